"""Hardware profiles by name or path, read from JSON (`profiles/` next to this file) and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autopar.costs.hardware.network import Network
from autopar.costs.hardware.profile import HOST, RESERVED, Efficiencies, Hardware, Latencies, Link, Protocol
from autopar.errors import PlanError
from autopar.files.reading import read_json, read_text
from autopar.files.schema import Flag, ListOf, Malformed, Maybe, Real, Record, Schema, Table, Text, Whole, differs

PROFILES = Path(__file__).parent / "profiles"
ALIASES: Mapping[str, str] = {"a100-80gb": "a100", "h100-80gb": "h100"}
"""Other names of profiles."""
_WORDS = {"name": Text(), "algorithm": Text()}


@dataclass(frozen=True, slots=True)
class _Sourced:
    """A number of some kind, bare or given together with its source."""

    kind: Schema

    def __str__(self) -> str:
        return f"{self.kind}, bare or given together with its source"

    def check(self, found: Any, where: str) -> None:
        try:
            self.kind.check(found["value"] if isinstance(found, Mapping) and "value" in found else found, where)
        except Malformed:
            differs(found, where, self)


_NUMBER = _Sourced(Real())
_OPTIONAL = (
    "elementwise_bytes_per_s",
    "product_bytes_per_s",
    "product_efficiency",
    "product_wave",
    "product_unaligned",
    "attention_efficiency",
    "attention_length",
    "attention_head",
    "launch_s",
    "collective_check_s",
    "dtensor_s",
    "communication_share",
    *HOST,
    *RESERVED,
)
"""Numbers of `Hardware` that a profile need not say."""
_WHOLE = ("host_memory_bytes", "host_devices", *RESERVED[1:])


def _numbers_of(cls: type) -> Record:
    """Return the schema of a class's numeric fields, all of them optional."""
    return Record({}, optional={each.name: _NUMBER for each in fields(cls) if each.name not in _WORDS})


_LINK = Record(
    {"name": Text(), "devices": Maybe(_Sourced(Whole(1))), "bytes_per_s": _NUMBER},
    optional={
        "latency_s": _NUMBER,
        "protocols": ListOf(Record(_WORDS, _numbers_of(Protocol).optional), most=100),
        "efficiencies": _numbers_of(Efficiencies),
        "latencies": _numbers_of(Latencies),
        "straggling_s": _NUMBER,
        "network": Record(
            {},
            optional={
                "nics_per_node": _Sourced(Whole(0)),
                "leaf_nics": _Sourced(Whole(0)),
                "rail_optimized": _Sourced(Flag()),
                "spine_oversubscription": _NUMBER,
            },
        ),
    },
    others=True,
)
PROFILE = Record(
    {
        "name": Text(),
        "flops": Table(_NUMBER),
        "memory_bytes_per_s": _NUMBER,
        "memory_bytes": _NUMBER,
        "op_latency_s": _NUMBER,
        "links": ListOf(_LINK, most=100),
    },
    optional={**dict.fromkeys(_OPTIONAL, _NUMBER), "variants": Table(Record({}, dict.fromkeys(_OPTIONAL, _NUMBER)))},
    others=True,
)
"""The fields of a profile; what else it says, as what a fit left over, is for those who read it."""


def known_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def load(name_or_path: str | Path) -> Hardware:
    """Read a profile by the name of one in the package, or by the path of a JSON file.

    Suffixes choose among the profile's `variants`, which replace some of its numbers: "h100:fa3:graph".
    """
    name, chosen = _split(name_or_path)
    path = _path_of(name)
    try:
        profile = _read(path)
        hardware = parse(profile)
        return parse({**profile, **_replaced(profile, chosen)}) if chosen else hardware
    except (Malformed, PlanError) as error:
        raise PlanError(f"the hardware profile {str(path)!r}: {error}") from None


def _split(name_or_path: str | Path) -> tuple[str | Path, tuple[str, ...]]:
    """Return a profile's name or path, and the variants that suffixes choose."""
    if not isinstance(name_or_path, str | Path):
        return name_or_path, ()
    parts = str(name_or_path).split(":")
    for count in range(len(parts), 0, -1):
        name = ":".join(parts[:count])
        if name in known_profiles() or name in ALIASES or name.endswith(".json"):
            return ALIASES.get(name, name), tuple(parts[count:])
    return name_or_path, ()


def _replaced(profile: Mapping[str, Any], chosen: Sequence[str]) -> dict[str, Any]:
    """Return the numbers that the chosen variants replace."""
    variants, by = profile.get("variants", {}), dict[str, str]()
    found: dict[str, Any] = {}
    for name in chosen:
        if name not in variants:
            known = ", ".join(map(repr, variants)) or "none"
            raise PlanError(f"it has no variant {name!r}, found {known}; use one of them, or leave the suffix out.")
        for number in variants[name]:
            if number in by:
                raise PlanError(f"its variants {by[number]!r} and {name!r} both replace {number}; choose one of them.")
            by[number], found[number] = name, variants[name][number]
    return found


def is_profile_of(profile: str, device: str) -> bool:
    """Return whether a profile may be of a device, by their names; of a profile of one's own nothing else is known.

    >>> is_profile_of("h100", "NVIDIA H100 80GB HBM3"), is_profile_of("h100", "NVIDIA A100-SXM4-80GB")
    (True, False)
    """
    words, profile = re.findall(r"[a-z0-9]+", device.lower()), str(_split(profile)[0])
    return profile not in known_profiles() or all(part in words for part in profile.split("-"))


def links_of(name_or_path: str | Path) -> dict[str, Any]:
    """Return the links and communication share of a profile that `load` reads: its JSON, with sources."""
    profile = _read(_path_of(_split(name_or_path)[0]))
    return {name: profile[name] for name in ("links", "communication_share") if name in profile}


def _path_of(name_or_path: str | Path) -> Path:
    """Return the path of a profile by name or path; raise PlanError if there is no such profile."""
    if not isinstance(name_or_path, str | os.PathLike):
        raise PlanError(f"hardware is a {type(name_or_path).__name__}; give the name of a profile, or its path.")
    path = Path(name_or_path)
    if path.suffix == ".json":
        if not os.path.isfile(path):  # also False for strings that are no valid path
            raise PlanError(f"the hardware profile {str(path)!r} does not exist; known names are {_known()}.")
    elif str(name_or_path) in known_profiles():
        path = PROFILES / f"{name_or_path}.json"
    else:
        raise PlanError(
            f"hardware {str(name_or_path)!r} is not known; use one of {_known()}, or the path of a .json profile."
        )
    return path


def _read(path: Path) -> Any:
    return read_json(read_text(path))


def parse(profile: Mapping[str, Any]) -> Hardware:
    """Return a Hardware from the JSON of a profile, whose numbers may be bare or given together with their source.

    Raises PlanError, which names the field, for what it lacks and for what makes no sense.
    """
    try:
        PROFILE.check(profile, "")
    except Malformed as error:
        raise PlanError(f"{error}; compare it with cpu.json.") from None
    if "overlap" in profile:
        raise PlanError(
            "it has 'overlap', shares that are hidden; what is hidden follows from the program. Give "
            "'communication_share' in its place, what a running collective takes of a device, or calibrate again."
        )
    return Hardware(
        profile["name"],
        {dtype: _number(profile["flops"], dtype) for dtype in profile["flops"]},
        _number(profile, "memory_bytes_per_s"),
        int(_number(profile, "memory_bytes")),
        _number(profile, "op_latency_s"),
        _links(profile["links"]),
        **{name: _optional(profile, name) for name in _OPTIONAL if name in profile},
    )


def _links(written: Sequence[Mapping[str, Any]]) -> tuple[Link, ...]:
    """Return the links of a profile, the network on the last one taken apart."""
    found: list[Link] = []
    for each in written:
        link = _link(each)
        if "network" in each:
            specified = {key: _value(each["network"], key) for key in each["network"]}
            found.extend(Network(**specified).links(link, (found[-1].devices if found else None) or 1))
        else:
            found.append(link)
    return tuple(found)


def _link(link: Mapping[str, Any]) -> Link:
    devices = None if link["devices"] is None else int(_number(link, "devices"))
    protocols = tuple(
        Protocol(protocol["name"], protocol["algorithm"], **_numbers(protocol))
        for protocol in link.get("protocols", ())
    )
    if not protocols and "latency_s" not in link:
        raise PlanError(f"the link {link['name']!r} lacks 'latency_s'; compare it with cpu.json.")
    return Link(
        link["name"],
        devices,
        _number(link, "latency_s") if "latency_s" in link else 0.0,
        _number(link, "bytes_per_s"),
        protocols,
        Efficiencies(**_numbers(link.get("efficiencies", {}))),
        Latencies(**_numbers(link.get("latencies", {}))),
        _number(link, "straggling_s") if "straggling_s" in link else 0.0,
    )


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {key: _number(found, key) for key in found if key not in _WORDS}


def _number(found: Mapping[str, Any], key: str) -> float:
    return float(_value(found, key))


def _value(found: Mapping[str, Any], key: str) -> Any:
    """Return the stated value, bare or given together with its source."""
    return found[key]["value"] if isinstance(found[key], Mapping) else found[key]


def _optional(found: Mapping[str, Any], key: str) -> Any:
    """Return a number of `Hardware`, whole where it counts something."""
    return int(_number(found, key)) if key in _WHOLE else _number(found, key)


def _known() -> str:
    return ", ".join(map(repr, known_profiles()))
