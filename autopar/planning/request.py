"""Requests for a plan: all options of a user besides the model, the mesh and the inputs.

One value serves `plan`, `compile`, `attach` and the stages of pipelines: they lay out spaces, pin and solve alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture.assumptions import Assumption, assumptions_of
from autopar.capture.export import Traced, trace
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import AUTO, LossTiles
from autopar.costs.hardware.load import load
from autopar.costs.hardware.overlap import OverlappedWork
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.costs.pricing.offload import check_host
from autopar.costs.pricing.optimizer import ADAMW, Offload, Optimizer
from autopar.costs.space.between_layouts import notes_on_moves
from autopar.costs.space.build import build_space
from autopar.costs.space.returned import Outputs, Returned
from autopar.costs.space.space import Space
from autopar.costs.space.zigzag_axes import is_worth_another_search, possible_zigzag_axes, zigzag_axes_of
from autopar.errors import InputError
from autopar.ir.program.precision import AS_IT_IS, Precision
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.pins import Mode, pins_of
from autopar.planning.expert_notes import warn_of_unknown_experts
from autopar.planning.formulation import Pins
from autopar.planning.options.groups import Capture, Experts, Memory, Offloaded, Pipeline
from autopar.planning.planner import Statements, best_plan_of
from autopar.planning.record import marked
from autopar.planning.replicated_work import (
    unused_axes,
    warn_of_kept_whole,
    warn_of_replicated_work,
    warn_of_unused_axes,
)
from autopar.planning.settings import Settings, context_of
from autopar.planning.simulated import as_simulated
from autopar.planning.whole_parameters import with_storage_settled
from autopar.solver.deadline import after, seconds_until
from autopar.strategies.presets import annotations_for
from autopar.strategies.presets.data import REDUCE_EACH, parts_named, warn_of_gradients
from autopar.strategies.rules.products.tiled import NAME as TILED_WEIGHT

LOSS_TILES: Mapping[str, LossTiles] = {"auto": None, "always": AUTO, "none": False}
"""Word for the tiles of losses → the same as capture takes it."""
Inputs = str | tuple[str, ...]
"""`"whole"`, `"local"`, or the axes over which the batch is given in parts."""


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
    graph_input_bytes: int = 0
    """Bytes of the copies of a step's inputs that a CUDA graph keeps."""

    def __post_init__(self) -> None:
        memory, names = self.memory, self.static_argnames
        assumptions_of(self.capture.assume)
        if memory.offload in ("optimizer", "both", "auto"):
            self.optimizer.check_offload()
        if memory.offloads_activations and self.experts.imbalance > 1:
            raise InputError(
                f"Memory(offload={memory.offload!r}) is given with Experts(imbalance={self.experts.imbalance:g}): "
                "copies to the host are planned for equal shares of the rows of experts; leave imbalance out, or give "
                'Memory(offload="optimizer") or Memory(offload="none").'
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
        return trace(
            model,
            args,
            kwargs,
            training=training,
            device=device,
            assume=self.assumptions,
            capacity_factor=self.experts.capacity_factor,
            precision=self.precision,
        )

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
        zigzag_axes: Collection[str] = (),
        overlapped: OverlappedWork | None = None,
    ) -> Space:
        """Build the space of plans; `input_layouts` says which inputs arrive split (see `build_space`).

        `num_devices` are those of all stages, if the program is one of a pipeline. Axes of `zigzag_axes` zigzag-shard
        positions; `plan` finds out which ones should. With Memory(offload="auto") the space is that of a model whose
        optimizer is on the device.
        """
        hardware, optimizer = self.hardware_of(mesh), self.optimizer
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
            self.experts.imbalance,
            whole,
            self.requested,
            num_devices,
            self.conventions,
            zigzag_axes,
            overlapped,
        )

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
        return self.memory.recompute in ("auto", "none") and self.experts.imbalance == 1

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

    def plan(self, space: Space, storage: Mapping[str, Layout] | None = None, stated: Statements | None = None) -> Plan:
        """Return the best plan of a space; `storage` gives layouts in which parameters, by name, are stored already.

        `stated` are its problems, where some were stated before.
        """
        specified = self.annotations_about(space.program, space.mesh, stored=bool(storage))
        problems, deadline = (stated or Statements(space)).with_zigzag_axes(()), after(self.settings.search.time_limit)

        def pinned(stated: Statements) -> tuple[Statements, Pins]:
            pins = {} if stated.space.kept else pins_of(specified, stated.space, self.mode, storage or {})
            return stated.narrowed(pins) if self.strategy else (stated, pins)  # else parameters may be kept whole

        def with_zigzag_axes(axes: Collection[str]) -> tuple[Statements, Pins]:
            with warnings.catch_warnings(action="ignore"):  # the first space has warned
                return pinned(problems.with_zigzag_axes(axes))

        def made(pins: Pins, settings: Settings, costs: Statements | None = None) -> Plan:
            found, _ = replace(self, settings=settings)._made(costs or problems, pins)
            context = replace(context_of(found), annotations=specified, mode=self.mode)
            moved = notes_on_moves(context.space, context.choices) if self.mode == "manual" else ()
            rows = tuple(marked(found.rows, context.space, specified))
            return replace(found, rows=rows, context=context, mode=self.mode, notes=(*found.notes, *moved))

        def again(costs: Space, incumbent: Plan, gap: float) -> Plan:
            context, settings = context_of(incumbent), self.settings.lasting(seconds_until(deadline))
            if gap:
                settings = replace(settings, search=replace(settings.search, gap=max(gap, settings.search.gap or 0.0)))
            with warnings.catch_warnings(action="ignore"):  # the first search has warned
                stated, same = Statements(costs, incumbent), costs.has_same_candidates(context.space)
                stated, allowed = (stated, context.pins) if same else pinned(stated)
                found = made(allowed, settings, stated)
            own = replace(context_of(found), settings=context.settings, keeps_whole=context.keeps_whole)
            return replace(found, context=own, notes=(*found.notes, *incumbent.notes[-1:] * context.keeps_whole))

        problems, pins = pinned(problems)
        if possible := possible_zigzag_axes(problems.space, pins):
            problems, pins = with_zigzag_axes(possible)
        plan = made(pins, self.settings)
        if self.training and self.strategy is None and self.mode != "manual" and not storage:
            plan = with_storage_settled(plan, specified, made, deadline)
        space, choices, in_order = problems.space, context_of(plan).choices, None
        if is_worth_another_search(space, choices, needed := zigzag_axes_of(space, choices)):
            in_order = with_zigzag_axes(needed)[0].space
            if context_of(plan).keeps_whole and not space.has_same_candidates(in_order):
                in_order = None  # its pins are of other strategies
        plan = as_simulated(plan, again, deadline, in_order)
        space, choices = context_of(plan).space, context_of(plan).choices
        self.warn(plan, space, choices, stored=bool(storage))
        unused = unused_axes(space, choices) if self.strategy is None else ()
        return replace(plan, notes=(*plan.notes, *map(str, unused)))

    def warn(self, plan: Plan, space: Space, choices: Sequence[int], stored: bool) -> None:
        """Warn of surprises in a plan of these choices; `stored` as in `annotations_about`."""
        specified = warn_of_replicated_work(self.strategy, [(space, tuple(choices))], stored)
        if not specified and (self.strategy is not None or not warn_of_unused_axes(space, choices)):
            warn_of_kept_whole(space.mesh, plan.kept_whole)
        warn_of_gradients(self.strategy, self.microbatches or 1)
        warn_of_unknown_experts(space)

    @property
    def reduces_each(self) -> bool:
        """True if the strategy has every micro-batch reduce the gradients of sharded weights."""
        return not REDUCE_EACH.isdisjoint(parts_named(self.strategy))

    def _made(self, stated: Statements, pins: Pins) -> tuple[Plan, tuple[int, ...]]:
        count, specified = self.microbatches or 1, self.searched
        self.optimizer.check_microbatches(count)
        free = count > 1 and specified.limit is not None and self.strategy is None
        ways = (False, True) if free else (self.reduces_each and count > 1,)
        lasting = self.conventions.main_gradients and self.training
        runs = [Microbatches(count, reduce_each=each, main_gradients=lasting) for each in ways]
        return best_plan_of(runs, stated, pins, specified)
