"""Requests for a plan: all options of a user besides the model, the mesh and the inputs.

One value serves `plan`, `compile`, `attach` and the stages of pipelines: they lay out spaces, pin and solve alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture.assumptions import Assumption, assumptions_of
from autopar.capture.experts.capacity import pad_rows
from autopar.capture.export import Traced, trace
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import AUTO, LossTiles
from autopar.costs.hardware.load import load
from autopar.costs.hardware.overlap import OverlappedWork
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.costs.pricing.offload import check_host
from autopar.costs.pricing.optimizer import ADAMW, Offload, Optimizer
from autopar.costs.space.build import build_space
from autopar.costs.space.returned import Outputs, Returned
from autopar.costs.space.space import Space
from autopar.errors import InputError, MeshError
from autopar.ir.program.precision import AS_IT_IS, Precision
from autopar.ir.program.program import Program, TensorInfo
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.layout import I, Layout, P, R
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.pins import Mode
from autopar.planning.options.groups import Capture, Experts, Memory, Offloaded, Pipeline
from autopar.planning.settings import Settings, WarmStart
from autopar.strategies.presets import annotations_for
from autopar.strategies.presets.data import REDUCE_EACH, parts_named
from autopar.strategies.rules.products.chunked import AGAIN as GATHERED_AGAIN
from autopar.strategies.rules.products.tiled import NAME as TILED_WEIGHT

LOSS_TILES: Mapping[str, LossTiles] = {"auto": None, "always": AUTO, "none": False}
"""Word for the tiles of losses → the same as capture takes it."""
MAX_LAYOUTS = 10_000
"""Layouts of a tensor: a table of moves between so many has up to 1e8 entries of 8 bytes."""
Inputs = str | tuple[str, ...]
"""`"whole"`, `"local"`, or the axes over which the batch is given in parts."""


def check_number_of_layouts(program: Program, mesh: Mesh) -> None:
    """Raise MeshError if a tensor has so many layouts that tables of moves between them would fill the memory."""
    axes = {name: size for name, size in mesh.axes.items() if size > 1}
    infos = (each.meta["tensor"] for each in program.graph.nodes if each.op != "output")
    shapes = [each.shape for each in infos if isinstance(each, TensorInfo)]
    splits = max((sum(size > 1 for size in shape) for shape in shapes), default=0)
    if (count := (len((I, R, P)) + splits) ** len(axes)) > MAX_LAYOUTS:
        raise MeshError(
            f"a tensor of {splits} dims has up to {count} layouts on the {len(axes)} axes of the mesh {mesh}, and at "
            f"most {MAX_LAYOUTS} are looked at. Give a mesh of fewer axes: join neighbours, such as "
            f"{' and '.join(list(axes)[:2])} to one of {math.prod(list(axes.values())[:2])} devices."
        )


def axes_of_parts(inputs: Inputs, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh over which the batch is given in parts, in their order.

    Raises InputError for other names.

    >>> axes_of_parts("local", Mesh({"dp": 2, "tp": 4})), axes_of_parts("dp", Mesh({"dp": 2, "tp": 4}))
    (('dp', 'tp'), ('dp',))
    """
    if inputs == "whole":
        return ()
    named = mesh.names if inputs == "local" else inputs if isinstance(inputs, tuple) else (inputs,)
    if not named or any(name not in mesh.names for name in named) or len(set(named)) != len(named):
        raise InputError(
            f'inputs={inputs!r}; give "whole" (the whole batch on every rank), "local" (every rank its own part), or '
            f"the axes over which ranks have different parts, of {', '.join(mesh.names)}."
        )
    return tuple(name for name in mesh.names if name in named)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Options for a plan, whatever the program and the mesh; raises InputError for an unknown word."""

    annotations: tuple[Annotation, ...] = ()
    """Annotations of the model by the user, without those of the preset."""
    strategy: str | None = None
    """The name of a preset."""
    mode: Mode = "auto"
    settings: Settings = Settings()
    """Options of memory and of the search, with those of one search among several."""
    optimizer: Optimizer = ADAMW
    hardware: str | Hardware | None = None
    """Name or path of a profile, or a profile; None: the mesh's own."""
    outputs: Outputs = "plain"
    inputs: Inputs = "whole"
    """"local", or the axes over which ranks are called with parts of the batch; "whole": over none."""
    microbatches: int | None = None
    """Number of micro-batches of a step; None: one, or as many as suit a pipeline."""
    pipeline: Pipeline = Pipeline()
    experts: Experts = Experts()
    capture: Capture = Capture()
    precision: Precision = AS_IT_IS
    training: bool = True
    """True if the plan includes gradients and optimizer steps; else only the forward is planned and run."""
    implementations: frozenset[str] = frozenset()
    """On-demand implementations to offer in addition to those that annotations and the preset request."""
    chosen_tiles: Tiles | None = None
    """Tiles that the search tries in place of those that the user requested."""
    warm_start: WarmStart | None = None
    """Plan that the search begins with, if one is known."""
    graph_input_bytes: int = 0
    """Bytes of the copies of a step's inputs that a CUDA graph keeps."""

    def __post_init__(self) -> None:
        memory, names = self.memory, self.static_argnames
        assumptions_of(self.capture.assume)
        if memory.offload in ("optimizer", "both", "auto"):
            self.optimizer.check_offload()
        name = "imbalance" if self.experts.padded is None else "padded"
        if memory.offloads_activations and self.experts.share > 1:
            raise InputError(
                f"Memory(offload={memory.offload!r}) is given with Experts({name}={self.experts.share:g}): "
                f"copies to the host are planned for equal shares of the rows of experts; leave {name} out, or give "
                'Memory(offload="optimizer") or Memory(offload="none").'
            )
        if self.experts.padded is not None and self.experts.imbalance > 1:
            raise InputError(
                f"Experts(imbalance={self.experts.imbalance:g}, padded={self.experts.padded:g}) says twice how many "
                "rows a device has: padded ones are equally many on all. Leave imbalance out."
            )
        if names and (self.microbatches or 1) > 1:
            raise InputError(
                f"Capture(static_argnames={list(names)}) is given with microbatches={self.microbatches}, and "
                "each micro-batch would get the values of the whole batch. Leave microbatches out, and accumulate "
                "gradients over several calls."
            )
        if self.mode not in ("auto", "semi_auto", "manual"):
            raise InputError(f'mode={self.mode!r}; modes are "auto", "semi_auto" and "manual".')
        if self.outputs not in ("plain", "dtensor", "full"):
            raise InputError(f'outputs={self.outputs!r}; outputs are "plain", "dtensor" or "full".')

    @property
    def memory(self) -> Memory:
        return self.settings.memory

    def with_memory(self, memory: Memory) -> PlanRequest:
        """Return the request with other options of memory."""
        return replace(self, settings=replace(self.settings, memory=memory))

    @property
    def conventions(self) -> MemoryConventions:
        return MemoryConventions.of(self.memory.conventions)

    def traced(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        training: bool | None = None,
        device: torch.device | None = None,
    ) -> Traced:
        """Trace a model as this request says; other arguments and errors as those of `capture.export.trace`."""
        found = trace(
            model,
            args,
            kwargs,
            training=training,
            device=device,
            assume=self.assumptions,
            capacity_factor=self.experts.capacity_factor,
            precision=self.precision,
        )
        if self.experts.padded is not None:
            pad_rows(found.draft, self.experts.padded)
        return found

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Branches on the values of tensors whose outcome is known."""
        return assumptions_of(self.capture.assume)

    @property
    def static_argnames(self) -> tuple[str, ...]:
        """Arguments of forward whose values are constants of the graph."""
        return tuple(self.capture.static_argnames or ())

    @property
    def tiles(self) -> Tiles:
        """Tiles in which the model is captured before any are tried because memory requires them."""
        losses, mlps = self.memory.loss_tiles, self.memory.mlp_tiles
        requested = Tiles(LOSS_TILES[losses] if isinstance(losses, str) else losses, None if mlps == "none" else mlps)
        return self.chosen_tiles or requested

    def returned(self, mesh: Mesh) -> Returned:
        """Return how outputs come back on a mesh: of a pipeline, that of one stage."""
        return Returned(self.outputs, axes_of_parts(self.inputs, mesh))

    def hardware_of(self, mesh: Mesh) -> Hardware:
        """Return the requested profile, or that of the mesh; PlanError if there is none of that name."""
        requested = self._requested(mesh)
        return requested if isinstance(requested, Hardware) else load(requested)

    def named(self, mesh: Mesh) -> Mesh:
        """Return the mesh with the name of the profile that is planned with, which is what its plan says."""
        requested = self._requested(mesh)
        return replace(mesh, hardware=requested.name if isinstance(requested, Hardware) else str(requested))

    def _requested(self, mesh: Mesh) -> str | Hardware:
        return mesh.hardware if self.hardware is None else self.hardware

    def on(self, mesh: Mesh) -> PlanRequest:
        """Return the request with the profile in place of its name, and the limit of a device of the mesh."""
        return replace(self.within(mesh), hardware=self.hardware_of(mesh))

    def within(self, mesh: Mesh) -> PlanRequest:
        """Return the request whose memory limit counts what devices of a mesh hold besides tensors.

        The mesh has the axis of a pipeline, if there is one. Raises InfeasibleError if nothing is left for tensors.
        """
        found, limit = self.conventions.reserved(self.hardware_of(mesh), mesh), self.settings.limit
        reserved = replace(found, graph_bytes=self.graph_input_bytes)
        if limit is not None:
            reserved.check(limit)
        return replace(self, settings=replace(self.settings, reserved=reserved))

    def annotations_about(self, program: Program, mesh: Mesh, stored: bool = False) -> tuple[Annotation, ...]:
        """Return the user's annotations and those of the preset; raise StrategyError if the preset does not fit.

        If parameters are `stored` already, these are further inputs of the model: what the preset splits and what does
        not divide in them stays whole.
        """
        if self.strategy is None:
            return self.annotations
        return (*self.annotations, *annotations_for(self.strategy, program, mesh, strict=not stored))

    def running(self, implementations: frozenset[str]) -> PlanRequest:
        """Return the request in whose spaces these are offered, as a plan that was made before has them."""
        return replace(self, implementations=self.implementations | implementations)

    @property
    def requested(self) -> frozenset[str]:
        """The names of implementations that are offered on demand; a preset may have one of its own name."""
        specified = [each.implementations for each in self.annotations]
        specified += [frozenset(parts_named(self.strategy))]
        specified += [frozenset((TILED_WEIGHT,))] if self.memory.weight_tiles else []
        return self.implementations.union(*specified)

    def space(
        self,
        program: Program,
        mesh: Mesh,
        input_layouts: Mapping[str, Layout] | None = None,
        whole: Program | None = None,
        num_devices: int | None = None,
        zigzag_axes: Collection[str] | None = (),
        overlapped: OverlappedWork | None = None,
    ) -> Space:
        """Build the space of plans; `input_layouts` says which inputs arrive split (see `build_space`).

        `num_devices` are those of all stages, if the program is one of a pipeline. Stages hold what several
        micro-batches save: within a memory limit their products may gather rows again in the backward. Axes of
        `zigzag_axes` zigzag-shard positions; None: all. With Memory(offload="auto") the space is that of a model whose
        optimizer is on the device.
        """
        check_number_of_layouts(program, mesh)
        hardware, optimizer = self.hardware_of(mesh), self.optimizer
        is_stage = (num_devices or mesh.num_devices) > mesh.num_devices
        gathering = frozenset((GATHERED_AGAIN,)) if is_stage and self.settings.limit is not None else frozenset()
        if self.offloads_optimizer:
            optimizer = self.offloading(hardware, num_devices or mesh.num_devices)
        elif self.memory.offload == "activations":
            check_host(hardware)
        return build_space(
            program,
            self.named(mesh),
            hardware,
            self.returned(mesh),
            input_layouts,
            optimizer,
            self.experts.share,
            whole,
            self.requested | gathering,
            num_devices,
            self.conventions,
            zigzag_axes,
            overlapped,
        )

    @property
    def first_zigzag_axes(self) -> Collection[str] | None:
        """Axes that zigzag-shard positions in the space to begin with: all, unless something may be pinned there."""
        return () if self.strategy is not None or self.annotations or self.mode == "manual" else None

    def offloading_as(self, offload: Offloaded) -> PlanRequest:
        """Return the request with another word on what is offloaded."""
        return self.with_memory(self.memory.offloading(offload))

    def with_activations_on_device(self) -> PlanRequest:
        """Return the request with activations on the device, where a word says that they leave."""
        if not self.memory.offloads_activations:
            return self
        return self.offloading_as("optimizer" if self.offloads_optimizer else "none")

    def without_auto(self, offloads_optimizer: bool) -> PlanRequest:
        """Return the request with a word in place of "auto": of the optimizer it says what was decided."""
        if self.memory.offload != "auto":
            return self
        activations = self.may_offload and self.settings.limit is not None
        words: dict[tuple[bool, bool], Offloaded] = {
            (False, False): "none",
            (False, True): "activations",
            (True, False): "optimizer",
            (True, True): "both",
        }
        return self.offloading_as(words[offloads_optimizer, activations])

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer state is on the host in any case, not only if memory requires it."""
        return self.memory.offload in ("optimizer", "both")

    @property
    def may_offload(self) -> bool:
        """True if layers may save tensors that can be offloaded, and the bytes of these are known."""
        return self.memory.recompute in ("auto", "none") and self.experts.share == 1

    @property
    def searched(self) -> Settings:
        """Settings of the search with the requested offload of activations.

        All activations are offloaded without a memory limit, and as many as needed with one.
        """
        if not self.memory.offloads_activations:
            return self.settings
        return replace(self.settings, activations="offloaded" if self.settings.limit is None else "may_offload")

    def offloading(self, hardware: Hardware, num_devices: int) -> Optimizer:
        """Return the optimizer with what it keeps on the hosts of so many devices; PlanError where a profile has
        none.
        """
        check_host(hardware)
        return replace(self.optimizer, offload=Offload(hardware.devices_on_host(num_devices)))

    @property
    def reduces_each(self) -> bool:
        """True if the strategy has every micro-batch reduce the gradients of sharded weights."""
        return not REDUCE_EACH.isdisjoint(parts_named(self.strategy))
