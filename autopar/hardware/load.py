"""Hardware profiles by name or path, read from JSON (`profiles/` beside this file) and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.hardware.profile import Efficiencies, Hardware, Latencies, Link, Overlap, Protocol

PROFILES = Path(__file__).parent / "profiles"


def known_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def load(name_or_path: str | Path) -> Hardware:
    """Read a profile by the name of one in the package, or by the path of a JSON file."""
    path = Path(name_or_path)
    if path.suffix == ".json":
        if not path.is_file():
            raise PlanError(f"the hardware profile {str(path)!r} does not exist; known names are {_known()}.")
    elif str(name_or_path) in known_profiles():
        path = PROFILES / f"{name_or_path}.json"
    else:
        raise PlanError(
            f"hardware {str(name_or_path)!r} is not known; use one of {_known()}, or the path of a .json profile."
        )
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise PlanError(f"the hardware profile {str(path)!r} is no JSON: {error}.") from None
    except KeyError as error:
        raise PlanError(f"the hardware profile {str(path)!r} lacks {error}; compare it with cpu.json.") from None
    except PlanError as error:
        raise PlanError(f"the hardware profile {str(path)!r}: {error}") from None


def parse(profile: Mapping[str, Any]) -> Hardware:
    """A Hardware from the JSON of a profile, whose numbers may be bare or stand beside their source.

    Raises KeyError for what it lacks, PlanError for what makes no sense.
    """
    return Hardware(
        profile["name"],
        {dtype: _number(profile["flops"], dtype) for dtype in profile["flops"]},
        _number(profile, "memory_bytes_per_s"),
        int(_number(profile, "memory_bytes")),
        _number(profile, "op_latency_s"),
        tuple(_link(link) for link in profile["links"]),
        Overlap(**_numbers(profile.get("overlap", {}), "overlap", Overlap)),
        _number(profile, "elementwise_bytes_per_s") if "elementwise_bytes_per_s" in profile else 0.0,
        _number(profile, "product_bytes_per_s") if "product_bytes_per_s" in profile else 0.0,
        _number(profile, "attention_efficiency") if "attention_efficiency" in profile else 1.0,
    )


def _link(link: Mapping[str, Any]) -> Link:
    devices = None if link["devices"] is None else int(_number(link, "devices"))
    protocols = tuple(
        Protocol(protocol["name"], protocol["algorithm"], **_numbers(protocol, f"a protocol of {link['name']}"))
        for protocol in link.get("protocols", ())
    )
    latency = _number(link, "latency_s") if "latency_s" in link or not protocols else 0.0
    efficiencies = Efficiencies(**_numbers(link.get("efficiencies", {}), "efficiencies", Efficiencies))
    latencies = Latencies(**_numbers(link.get("latencies", {}), "latencies", Latencies))
    return Link(link["name"], devices, latency, _number(link, "bytes_per_s"), protocols, efficiencies, latencies)


def _numbers(found: Mapping[str, Any], what: str, cls: type = Protocol) -> dict[str, float]:
    """The fields of `cls` that are numbers; other keys are refused, as a misspelt one would count as the default."""
    words = ("name", "algorithm")
    known = [field.name for field in fields(cls) if field.name not in words]
    unknown = [key for key in found if key not in (*known, *words)]
    if unknown:
        raise PlanError(f"{what} has {', '.join(map(repr, unknown))}; it may have {', '.join(map(repr, known))}.")
    return {key: _number(found, key) for key in known if key in found}


def _number(found: Mapping[str, Any], key: str) -> float:
    value = found[key]["value"] if isinstance(found[key], Mapping) else found[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{key} is {value!r}; give a number, bare or as the value beside its source.")
    return float(value)


def _known() -> str:
    return ", ".join(map(repr, known_profiles()))
