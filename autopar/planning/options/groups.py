"""Groups of options that a plan depends on: Memory, Pipeline, Experts, Search and Capture."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from autopar.console.names import MEMORY_CONVENTIONS, OFFLOADED, PREFETCH_DEPTHS, RECOMPUTATIONS, SCHEDULES
from autopar.console.units import format_bytes, parse_bytes
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.errors import InputError
from autopar.files.schema import Flag, Maybe, OneOf, Real, Text, Whole
from autopar.planning.options.definition import EitherOf, Group, Satisfying, option

Recompute = Literal["auto", "none", "selective", "full_save_collectives", "full"]
Offloaded = Literal["none", "optimizer", "activations", "both", "auto"]
Prefetch = Literal["auto", 0, 1, 2]
Solver = Literal["auto", "ilp"]

TIME_LIMIT = 120.0  # seconds
MAX_BYTES = 2**53  # 9 PB: shares of more are not exact
MAX_TILES = 1024  # each is a turn of a loop, which compilers unroll


def _is_number(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


def is_names(found: object) -> bool:
    """Return whether a value is a list or a tuple of texts."""
    return isinstance(found, Sequence) and not isinstance(found, str) and all(isinstance(each, str) for each in found)


def _is_bytes(found: Any) -> bool:
    return isinstance(found, str) or (isinstance(found, int) and not isinstance(found, bool) and found > 0)


def _names_in(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_ON_DEVICE = Satisfying(_is_bytes, 'bytes per device, as a whole number above 0 or as text ("8GB")')
_ON_HOST = Satisfying(_is_bytes, 'bytes per host, as a whole number above 0 or as text ("512GB")')
_TILES = Whole(1, MAX_TILES)
_CONVENTIONS = EitherOf(
    OneOf(MEMORY_CONVENTIONS),
    Satisfying(lambda found: isinstance(found, MemoryConventions), "an autopar.MemoryConventions"),
)
_MODULES = Satisfying(is_names, 'a list of names of modules, as in ["layers.4", "layers.8"]', _names_in)
_LINES = Satisfying(is_names, 'a list of the lines whose checks are taken to pass, ["model.py:12"]', _names_in)
_ARGUMENTS = Satisfying(is_names, 'a list of names of arguments of forward, as in ["image_grid_thw"]', _names_in)
_FACTOR = Satisfying(
    lambda found: _is_number(found) and 0 < found <= sys.float_info.max,
    "a finite number above 0 (1.25: a quarter more rows than an expert has where routing is balanced)",
    float,
)
_SECONDS = Satisfying(
    lambda found: _is_number(found) and (0 <= found <= sys.float_info.max or found == math.inf),
    "seconds of at least 0",
    float,
)
_SHARE = Satisfying(
    lambda found: _is_number(found) and 0 <= found < 1,
    "a share of the step of at least 0 and below 1, 0 for a plan that is proven best",
    float,
)
_FOLDER = Satisfying(lambda found: isinstance(found, str | os.PathLike), "the path of a folder")


@dataclass(frozen=True, slots=True, repr=False)
class Memory(Group):
    """Memory of a device: its limit, and what a plan may do to stay within. `memory="80GB"` is Memory("80GB").

    >>> Memory("80GB", offload="optimizer")
    Memory(limit='80GB', offload='optimizer')
    """

    has_shorthand: ClassVar[bool] = True

    limit: str | int | None = option(None, Maybe(_ON_DEVICE), flat="memory")
    """Hard limit per device at every moment of a step, in bytes or as text ("80GB")."""
    recompute: Recompute = option("auto", OneOf(("auto", *RECOMPUTATIONS)), of_training=True)
    """Layers that the backward computes again: "auto" (those that the limit requires), or one mode for every layer:
    "none", "selective" (saves products, attention and results of reductions), "full_save_collectives" (saves results of
    collectives alone) or "full" (saves a layer's inputs; its collectives run again)."""
    prefetch: Prefetch = option("auto", EitherOf(OneOf(("auto",)), Whole(0, max(PREFETCH_DEPTHS))))
    """Number of layers ahead of their use that sharded weights are gathered, forward and backward; their memory counts.
    "auto": 1, or 0 if the limit leaves no room."""
    offload: Offloaded = option("none", OneOf(OFFLOADED), of_training=True)
    """Data on the host: "optimizer" (AdamW's state and master copies, stepped there by `autopar.optim.OffloadedAdamW`),
    "activations" (saved by layers for their backward, all of them, or under a limit as many as it requires), "both",
    "none", or "auto" (what the limit requires)."""
    host_limit: str | int | None = option(None, Maybe(_ON_HOST), flat="host_memory", of_training=True)
    """Hard limit on what all devices of a host offload to it, in bytes or as text ("512GB"); by default the memory that
    the hardware profile says a host has."""
    loss_tiles: int | Literal["auto", "always", "none"] = option(
        "auto", EitherOf(_TILES, OneOf(("auto", "always", "none"))), of_training=True
    )
    """Number of row tiles of the cross-entropy of a linear layer, whose logits are then never whole. "auto": tiles if
    the limit requires them and only the loss is returned, not on a mesh with a pipeline; "always": as many tiles as the
    plan chooses; "none": no tiles."""
    mlp_tiles: int | Literal["auto", "none"] = option(
        "none", EitherOf(_TILES, OneOf(("auto", "none"))), of_training=True
    )
    """Number of row tiles of MLPs, which then save no hidden values and compute them again. "auto": tiles if the limit
    requires them, not on a mesh with a pipeline; "none": no tiles."""
    weight_tiles: bool = option(False, Flag(), of_training=True)
    """Let products gather a weight one tile at a time, forward and backward, if the limit requires it."""
    conventions: str | MemoryConventions = option("autopar", _CONVENTIONS, flat="memory_conventions")
    """Memory that counts besides tensors: "autopar" (what its runtime holds), "tensors" (nothing), "megatron" or
    "deepspeed" (for comparisons with these), or an `autopar.MemoryConventions`."""

    def __post_init__(self) -> None:
        self.check()
        for name, size in (("limit", self.limit), ("host_limit", self.host_limit)):
            if size is not None and not 0 < parse_bytes(size) <= MAX_BYTES:
                raise InputError(
                    f"Memory({name}={size!r}); give at least 1 byte, and at most {format_bytes(MAX_BYTES)}."
                )
        if self.weight_tiles and self.limit is None:
            raise InputError(
                "Memory(weight_tiles=True) has weights gathered a tile at a time where a memory limit asks for it, and "
                'none is given; give a limit, as in Memory(limit="40GB", weight_tiles=True), or leave weight_tiles out.'
            )
        if self.offloads_activations and self.recompute not in ("auto", "none"):
            raise InputError(
                f"Memory(offload={self.offload!r}) sends what layers save for their backward to the host, and "
                f'Memory(recompute={self.recompute!r}) has them keep next to nothing; give Memory(recompute="auto") '
                'or Memory(recompute="none").'
            )
        if self.offload == "none" and self.host_limit is not None:
            raise InputError(
                f"Memory(host_limit={self.host_limit!r}) limits what is offloaded, and nothing is; give "
                'Memory(offload="optimizer"), "activations", "both" or "auto", too, or leave it out.'
            )

    @property
    def limit_bytes(self) -> int | None:
        """The limit per device in bytes."""
        return None if self.limit is None else parse_bytes(self.limit)

    @property
    def host_limit_bytes(self) -> int | None:
        """The limit per host in bytes."""
        return None if self.host_limit is None else parse_bytes(self.host_limit)

    @property
    def offloads_activations(self) -> bool:
        """True if activations are offloaded, or may be, in any case."""
        return self.offload in ("activations", "both")

    def limited(self, limit: int | None) -> Memory:
        """Return the options with another limit; without one no weights are gathered by tiles."""
        return replace(self, limit=limit, weight_tiles=self.weight_tiles and limit is not None)

    def offloading(self, offload: Offloaded) -> Memory:
        """Return the options with other data on the host."""
        return replace(self, offload=offload, host_limit=None if offload == "none" else self.host_limit)


@dataclass(frozen=True, slots=True, repr=False)
class Pipeline(Group):
    """Pipeline over one mesh axis, whose ranks run stages of the model. `pipeline="pp"` is Pipeline("pp")."""

    has_shorthand: ClassVar[bool] = True

    axis: str | None = option(None, Maybe(Text()), flat="pipeline", of_training=True)
    """Mesh axis whose ranks run stages of the model one after the other; by default the one called "pp"."""
    schedule: str | None = option(None, Maybe(OneOf(SCHEDULES)), of_training=True)
    """Schedule of the micro-batches; by default the one with the shortest predicted step of those that compute the
    gradients of gradient accumulation."""
    stages_per_rank: int | None = option(None, Maybe(Whole(1)), of_training=True)
    """Stages of the pipeline per rank; by default as few as the schedule takes."""
    split_points: Sequence[str] | None = option(None, Maybe(_MODULES), of_training=True)
    """Modules with which the second and later stages begin; by default the cuts of the shortest step."""


@dataclass(frozen=True, slots=True, repr=False)
class Experts(Group):
    """Rows of mixtures of experts."""

    capacity_factor: float | None = option(None, Maybe(_FACTOR))
    """Most rows that a sorted expert takes of each sample, as a multiple of its share under balanced routing; later
    rows are dropped. By default no row is."""
    imbalance: float = option(1.0, Real(1))
    """Rows of experts on the busiest device, as a multiple of its share, if a plan shards these by expert; 1.0 for
    balanced routing."""
    padded: float | None = option(None, Maybe(Real(1)), flat="padded_rows")
    """Rows that a device sends to each device of an expert axis, as a multiple of their share under balanced routing:
    messages are padded to as many, so that no device waits until the host has counted rows, and a step can be a CUDA
    graph. More rows are an error on the device. By default messages have the rows that there are (dropless)."""

    @property
    def share(self) -> float:
        """Rows of experts to plan for, as a multiple of a device's share."""
        return self.imbalance if self.padded is None else self.padded


@dataclass(frozen=True, slots=True, repr=False)
class Search(Group):
    """Search for the best plan."""

    time_limit: float = option(TIME_LIMIT, _SECONDS)
    """Seconds, capture included, after which the best plan found so far is returned, with its bound and a warning;
    TimeLimitError if there is none. All stages of a pipeline share them, and so do all meshes of "auto"."""
    gap: float | None = option(None, Maybe(_SHARE))
    """Relative optimality gap at which the search may stop if proof is expensive: under a memory limit, and if the
    graph is too wide for elimination. By default 0.1%, and only if going on would take long; 0 goes on until the
    optimum is proven or time is over."""
    solver: Solver = option("auto", OneOf(("auto", "ilp")))
    """Solver: "auto", or "ilp" (the plain reference ILP)."""
    cache: str | os.PathLike[str] | None = option(None, Maybe(_FOLDER), flat="plan_cache", of_each_rank=True)
    """Folder in which plans are kept, so that the same request is not solved again; by default the folder that the
    environment variable AUTOPAR_PLAN_CACHE names, or none."""
    max_axes: int | None = option(None, Maybe(Whole(1)))
    """Most axes of a mesh that `plan` searches for (mesh="auto"); by default 2, or 3 if the model has experts or the
    batch has fewer samples than devices."""


@dataclass(frozen=True, slots=True, repr=False)
class Capture(Group):
    """Capture of the model as one graph."""

    assume: Sequence[str] | None = option(None, Maybe(_LINES))
    """Branches on values of tensors that capture need not follow, as a CaptureError names them: a check that passes by
    its line ("model.py:12"), another branch with the value that it tests ("model.py:88=False")."""
    static_argnames: Sequence[str] | None = option(None, Maybe(_ARGUMENTS))
    """Arguments of forward whose tensors decide sizes by their values, such as ["image_grid_thw"]: the values are
    constants of the graph, and a call with other values is captured and planned anew."""
