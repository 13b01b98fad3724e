"""Requests for a plan: all options of a user besides the model, the mesh and the inputs.

One value serves `plan`, `compile`, `attach` and the stages of pipelines: they lay out spaces, pin and solve alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from autopar.capture.assumptions import Assumption
from autopar.capture.tiles.mlp import MlpTiles
from autopar.capture.tiles.tiled_losses import LossTiles
from autopar.costs.hardware.load import load
from autopar.costs.hardware.overlap import Beside
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import OF_AUTOPAR, MemoryConventions
from autopar.costs.pricing.offload import check_host
from autopar.costs.pricing.optimizer import ADAMW, Offload, Optimizer
from autopar.costs.space.between_layouts import notes_on_moves
from autopar.costs.space.build import build_space
from autopar.costs.space.dealing import deals, is_worth_another_search, may_deal
from autopar.costs.space.returned import Outputs, Returned
from autopar.costs.space.space import Space
from autopar.errors import CutOffError, InfeasibleError, InputError, TimeLimitError
from autopar.ir.program.precision import AS_IT_IS, Precision
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.pins import Mode, pins_of
from autopar.planning.expert_notes import warn_of_unknown_experts
from autopar.planning.formulation import Pins
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
from autopar.solver.deadline import after, is_over, seconds_until
from autopar.strategies.presets import annotations_for
from autopar.strategies.presets.data import REDUCE_EACH, parts_named, warn_of_gradients
from autopar.strategies.rules.products.tiled import NAME as TILED_WEIGHT

Offloaded = Literal["none", "optimizer", "activations", "both", "auto"]
OFFLOADED: tuple[Offloaded, ...] = ("none", "optimizer", "activations", "both", "auto")
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
    settings: Settings = field(default_factory=Settings)
    optimizer: Optimizer = ADAMW
    hardware: str | Hardware | None = None
    """Name or path of a profile, or a profile; None: the mesh's own."""
    outputs: Outputs = "plain"
    microbatches: int | None = None
    """Into how many parts a batch is split; None: one, or as many as suit a pipeline."""
    pipeline: str | None = None
    """The axis of a pipeline; None: the one called "pp", if there is one."""
    schedule: str | None = None
    chunks: int | None = None
    stages: tuple[str, ...] | None = None
    """Modules with which the second and later stages of a pipeline begin."""
    assume: tuple[Assumption, ...] = ()
    """Branches on the values of tensors whose outcome is known."""
    inputs: Inputs = "whole"
    """"local", or the axes over which ranks are called with parts of the batch; "whole": over none."""
    capacity_factor: float | None = None
    """Largest number of rows an expert takes of a sample, as a multiple of its balanced share; None for no limit."""
    loss_tiles: LossTiles = None
    """Into how many tiles of rows the cross-entropy of a linear layer is taken; "auto": the plan chooses; None: where
    memory asks for it; False: never."""
    mlp_tiles: MlpTiles = None
    """Into how many tiles of rows MLPs are taken; "auto": where memory asks for it; None: the model as it is."""
    weight_tiles: bool = False
    """True if sharded weights may be gathered a tile at a time."""
    imbalance: float = 1.0
    """Ratio of the busiest device's expert rows to its equal share."""
    precision: Precision = AS_IT_IS
    training: bool = True
    """True if the plan includes gradients and optimizer steps; else only the forward is planned and run."""
    implementations: frozenset[str] = frozenset()
    """On-demand implementations to offer in addition to those that annotations and the preset request."""
    offload: Offloaded = "none"
    """Data on the host.

    "optimizer": optimizer state, which is updated there. "activations": what layers save for their backward. "both", or
    "none". "auto": what the memory limit requires.
    """
    host_memory: int | None = None
    """Bytes of a host that may be taken; None: those that the profile says it has."""
    static_argnames: tuple[str, ...] = ()
    """Arguments of forward whose values are constants of the graph."""
    memory_conventions: MemoryConventions = OF_AUTOPAR
    """Conventions on what counts as memory of a device."""

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADED:
            raise InputError(f"offload={self.offload!r}; give {', '.join(map(repr, OFFLOADED))}.")
        if self.offload in ("optimizer", "both", "auto"):
            self.optimizer.check_offload()
        if self.offload in ("activations", "both") and self.imbalance > 1:
            raise InputError(
                f"offload={self.offload!r} with imbalance={self.imbalance:g}: copies to the host are planned for "
                'equal shares of the rows of experts; leave imbalance out, or give offload="optimizer" or "none".'
            )
        if self.offload in ("activations", "both") and not self.may_leave:
            raise InputError(
                f"offload={self.offload!r} sends what layers keep for their backward to the host, and "
                f'recompute={self.settings.recompute!r} has them keep next to nothing; give recompute="auto" or "none".'
            )
        if self.offload == "none" and self.host_memory is not None:
            raise InputError(
                f"host_memory={self.host_memory} limits what is offloaded, and nothing is; give "
                'offload="optimizer", "activations", "both" or "auto", too, or leave it out.'
            )
        if self.static_argnames and (self.microbatches or 1) > 1:
            raise InputError(
                f"static_argnames={list(self.static_argnames)} is given with microbatches={self.microbatches}, and "
                "each micro-batch would get the values of the whole batch. Leave microbatches out, and accumulate "
                "gradients over several calls."
            )
        if self.mode not in ("auto", "semi_auto", "manual"):
            raise InputError(f'mode={self.mode!r}; modes are "auto", "semi_auto" and "manual".')
        if self.outputs not in ("plain", "dtensor", "full"):
            raise InputError(f'outputs={self.outputs!r}; outputs are "plain", "dtensor" or "full".')
        if self.weight_tiles and self.settings.memory is None:
            raise InputError(
                "weight_tiles=True has weights gathered a tile at a time where a memory limit asks for it, and none is "
                'given; give memory=, as in memory="40GB", or leave weight_tiles out.'
            )

    def returned(self, mesh: Mesh) -> Returned:
        """Return how outputs come back on a mesh: of a pipeline, that of one stage."""
        return Returned(self.outputs, axes_of_parts(self.inputs, mesh))

    def hardware_of(self, mesh: Mesh) -> Hardware:
        """Return the requested profile, or that of the mesh; PlanError if there is none of that name."""
        asked = self._asked(mesh)
        return asked if isinstance(asked, Hardware) else load(asked)

    def named(self, mesh: Mesh) -> Mesh:
        """The mesh with the name of the profile that is planned with, which is what its plan says."""
        asked = self._asked(mesh)
        return replace(mesh, hardware=asked.name if isinstance(asked, Hardware) else str(asked))

    def _asked(self, mesh: Mesh) -> str | Hardware:
        return mesh.hardware if self.hardware is None else self.hardware

    def on(self, mesh: Mesh) -> PlanRequest:
        """The request with the profile itself, read once, in place of its name, and a limit for devices of the mesh."""
        return replace(self.within(mesh), hardware=self.hardware_of(mesh))

    def within(self, mesh: Mesh) -> PlanRequest:
        """Return the request whose memory limit counts what devices of a mesh hold besides tensors.

        The mesh has the axis of a pipeline, if there is one. Raises InfeasibleError if nothing is left for tensors.
        """
        reserved, limit = self.memory_conventions.reserved(self.hardware_of(mesh), mesh), self.settings.memory
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
        """The request in whose spaces these are offered, as a plan that was made before has them."""
        return replace(self, implementations=self.implementations | implementations)

    @property
    def asked(self) -> frozenset[str]:
        """The names of implementations that are offered on demand; a preset may have one of its own name."""
        said = [each.implementations for each in self.annotations]
        said += [frozenset(parts_named(self.strategy))]
        said += [frozenset((TILED_WEIGHT,))] if self.weight_tiles else []
        return self.implementations.union(*said)

    def space(
        self,
        program: Program,
        mesh: Mesh,
        input_layouts: Mapping[str, Layout] | None = None,
        whole: Program | None = None,
        num_devices: int | None = None,
        dealing: Collection[str] = (),
        beside: Beside | None = None,
    ) -> Space:
        """Build the space of plans; `input_layouts` says which inputs arrive split (see `build_space`).

        `num_devices` are those of all stages, if the program is one of a pipeline. Axes of `dealing` zigzag-shard
        positions; `plan` finds out which ones should. With offload="auto" the space is that of a model whose optimizer
        is on the device.
        """
        hardware, optimizer = self.hardware_of(mesh), self.optimizer
        if self.offloads_optimizer:
            optimizer = self.offloading(hardware, num_devices or mesh.num_devices)
        elif self.offload == "activations":
            check_host(hardware)
        return build_space(
            program,
            self.named(mesh),
            hardware,
            self.returned(mesh),
            input_layouts,
            optimizer,
            self.imbalance,
            whole,
            self.asked,
            num_devices,
            self.memory_conventions,
            dealing,
            beside,
        )

    def offloading_as(self, offload: Offloaded) -> PlanRequest:
        """The request with another word on what is offloaded."""
        return replace(self, offload=offload, host_memory=None if offload == "none" else self.host_memory)

    def keeping_activations(self) -> PlanRequest:
        """The request with activations on the device, where a word says that they leave."""
        if self.offload not in ("activations", "both"):
            return self
        return self.offloading_as("optimizer" if self.offloads_optimizer else "none")

    def without_auto(self, offloads_optimizer: bool) -> PlanRequest:
        """The request with a word in place of "auto": of the optimizer it says what was decided."""
        if self.offload != "auto":
            return self
        activations = self.may_leave and self.settings.memory is not None
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
        return self.offload in ("optimizer", "both")

    @property
    def may_leave(self) -> bool:
        """True if layers may save tensors that can be offloaded, and the bytes of these are known."""
        return self.settings.recompute in ("auto", "none") and self.imbalance == 1

    @property
    def searched(self) -> Settings:
        """Settings of the search with the requested offload of activations.

        All activations are offloaded without a memory limit, and as many as needed with one.
        """
        if self.offload not in ("activations", "both"):
            return self.settings
        return replace(self.settings, activations="leave" if self.settings.memory is None else "may leave")

    def offloading(self, hardware: Hardware, num_devices: int) -> Optimizer:
        """The optimizer with what it keeps on the hosts of so many devices; PlanError where a profile has none."""
        check_host(hardware)
        return replace(self.optimizer, offload=Offload(hardware.devices_on_host(num_devices)))

    def plan(self, space: Space, storage: Mapping[str, Layout] | None = None, stated: Statements | None = None) -> Plan:
        """The best plan of a space; `storage` gives layouts in which parameters, by name, are stored already.

        `stated` are its problems, where some were stated before.
        """
        said = self.annotations_about(space.program, space.mesh, stored=bool(storage))
        problems, deadline = (stated or Statements(space)).dealing_over(()), after(self.settings.time_limit)
        pins = pins_of(said, problems.space, self.mode, storage or {})

        def dealing_over(axes: Collection[str]) -> tuple[Statements, Pins]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings were issued for the first space
                other = problems.dealing_over(axes)
                return other, pins_of(said, other.space, self.mode, storage or {})

        def made(pins: Pins, settings: Settings, costs: Statements | None = None) -> Plan:
            found, _ = replace(self, settings=settings)._made(costs or problems, pins)
            context = replace(context_of(found), annotations=said, mode=self.mode)
            moved = notes_on_moves(context.space, context.choices) if self.mode == "manual" else ()
            rows = tuple(marked(found.rows, context.space, said))
            return replace(found, rows=rows, context=context, mode=self.mode, notes=(*found.notes, *moved))

        def again(costs: Space) -> Plan:
            context = context_of(plan)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings were issued for the first search
                left = replace(self.settings, time_limit=seconds_until(deadline))
                found = made(context.pins, left, Statements(costs))
            own = replace(context_of(found), settings=context.settings, keeps_whole=context.keeps_whole)
            return replace(found, context=own, notes=(*found.notes, *plan.notes[-1:] * context.keeps_whole))

        if possible := may_deal(problems.space, pins):
            problems, pins = dealing_over(possible)
        plan = made(pins, self.settings)
        choices = context_of(plan).choices
        needed = deals(problems.space, choices)
        if is_worth_another_search(problems.space, choices, needed) and not is_over(deadline):
            fewer, own = dealing_over(needed)
            with suppress(CutOffError, InfeasibleError, TimeLimitError):
                plan = made(own, replace(self.settings, time_limit=seconds_until(deadline)), fewer)
                problems = fewer
        if self.training and self.strategy is None and self.mode != "manual" and not storage:
            plan = with_storage_settled(plan, said, made, deadline)
        plan = as_simulated(plan, again, deadline)
        space, choices = context_of(plan).space, context_of(plan).choices
        self.warn(plan, space, choices, stored=bool(storage))
        unused = unused_axes(space, choices) if self.strategy is None else ()
        return replace(plan, notes=(*plan.notes, *map(str, unused)))

    def warn(self, plan: Plan, space: Space, choices: Sequence[int], stored: bool) -> None:
        """Warn of surprises in a plan of these choices; `stored` as in `annotations_about`."""
        said = warn_of_replicated_work(self.strategy, [(space, tuple(choices))], stored)
        if not said and (self.strategy is not None or not warn_of_unused_axes(space, choices)):
            warn_of_kept_whole(space.mesh, plan.kept_whole)
        warn_of_gradients(self.strategy, self.microbatches or 1)
        warn_of_unknown_experts(space)

    @property
    def reduces_each(self) -> bool:
        """True if the strategy has every micro-batch reduce the gradients of sharded weights."""
        return not REDUCE_EACH.isdisjoint(parts_named(self.strategy))

    def _made(self, stated: Statements, pins: Pins) -> tuple[Plan, tuple[int, ...]]:
        """The plan and its choices."""
        count, said = self.microbatches or 1, self.searched
        self.optimizer.check_microbatches(count)
        free = count > 1 and said.memory is not None and self.strategy is None
        ways = (False, True) if free else (self.reduces_each and count > 1,)
        lasting = self.memory_conventions.main_gradients and self.training
        runs = [Microbatches(count, reduce_each=each, main_gradients=lasting) for each in ways]
        return best_plan_of(runs, stated, pins, said)
