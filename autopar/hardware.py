"""What the planner assumes of a machine: peak FLOP/s, memory, and the links between devices, read from JSON profiles.

A profile in `profiles/` states every number as {"value": …, "source": …}. Sources say "datasheet", "measured" (with
hardware, date and script) or "assumed". A profile of one's own is the same file anywhere, given by its path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.mesh import Mesh

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network: it joins groups of `devices` consecutive devices (None: any number).

    A message over n devices takes `latency_s` + its share of bytes / `bytes_per_s`, what one device can send per second
    while it receives as much.
    """

    name: str
    devices: int | None
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise PlanError(f"link {self.name!r} joins {self.devices} devices; give at least 1, or null for any.")
        if not 0 <= self.latency_s < math.inf:
            raise PlanError(f"link {self.name!r} has a latency of {self.latency_s} s; give seconds of at least 0.")
        if not 0 < self.bytes_per_s < math.inf:
            raise PlanError(f"link {self.name!r} moves {self.bytes_per_s} bytes/s; give a number above 0.")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device and the links that join many of them, innermost first."""

    name: str
    flops: Mapping[str, float]
    """dtype name, as in "bfloat16" → peak FLOP/s of a dense matmul."""
    memory_bytes_per_s: float
    memory_bytes: int
    op_latency_s: float
    """Seconds that any operation takes, however small."""
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        numbers = {f"flops of {dtype}": value for dtype, value in self.flops.items()}
        numbers |= {"memory_bytes_per_s": self.memory_bytes_per_s, "memory_bytes": self.memory_bytes}
        for what, value in numbers.items():
            if not 0 < value < math.inf:
                raise PlanError(f"hardware {self.name!r} has {what} = {value}; give a number above 0.")
        if "float32" not in self.flops:
            raise PlanError(f"hardware {self.name!r} has no flops for float32, to which other dtypes fall back.")
        if not 0 <= self.op_latency_s < math.inf:
            raise PlanError(f"hardware {self.name!r} has op_latency_s = {self.op_latency_s}; give at least 0.")
        if not self.links or self.links[-1].devices is not None:
            raise PlanError(f"hardware {self.name!r} needs a last link that joins any number of devices (null).")
        inner = [link.devices for link in self.links[:-1]]
        sizes = [devices for devices in inner if devices is not None]
        if len(sizes) < len(inner) or sizes != sorted(set(sizes)):
            raise PlanError(f"hardware {self.name!r} has links of {inner} devices; list them innermost first, growing.")

    def __hash__(self) -> int:
        flops = tuple(sorted(self.flops.items()))
        return hash((self.name, flops, self.memory_bytes_per_s, self.memory_bytes, self.op_latency_s, self.links))

    def flops_of(self, dtype: object) -> float:
        """Peak FLOP/s of a torch dtype or a dtype's name; those the profile does not list compute as float32."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


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
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise PlanError(f"the hardware profile {str(path)!r} is no JSON: {error}.") from None
    except KeyError as error:
        raise PlanError(f"the hardware profile {str(path)!r} lacks {error}; compare it with cpu.json.") from None


def link_of(hardware: Hardware, mesh: Mesh, axis: str) -> Link:
    """The innermost link that holds every group of `axis`, with the mesh's last axis on neighbouring devices.

    A group of the axis spans stride × size consecutive devices, where the stride is the product of the later axes.
    It lies inside one node when the span divides the node, or when the whole mesh does fit in.
    """
    position = mesh.index(axis)
    span = math.prod(mesh.sizes[position:])
    for link in hardware.links[:-1]:
        assert link.devices is not None
        if mesh.num_devices <= link.devices or link.devices % span == 0:
            return link
    return hardware.links[-1]


def _known() -> str:
    return ", ".join(map(repr, known_profiles()))


def _parse(profile: Mapping[str, Any]) -> Hardware:
    """A Hardware from the JSON of a profile, whose numbers may be bare or stand beside their source."""
    links = tuple(
        Link(
            link["name"],
            _value(link["devices"]),
            float(_value(link["latency_s"])),
            float(_value(link["bytes_per_s"])),
        )
        for link in profile["links"]
    )
    return Hardware(
        profile["name"],
        {dtype: float(_value(number)) for dtype, number in profile["flops"].items()},
        float(_value(profile["memory_bytes_per_s"])),
        int(_value(profile["memory_bytes"])),
        float(_value(profile["op_latency_s"])),
        links,
    )


def _value(number: Any) -> Any:
    return number["value"] if isinstance(number, Mapping) else number
