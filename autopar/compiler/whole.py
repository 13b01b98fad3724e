"""`compile` on a mesh without a pipeline: capture, plan, rewrite, run."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.export import Traced, freeze, skeleton
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.compiler.arguments import Run, check_buckets, check_hooks, check_no_pipeline, on_device
from autopar.compiler.batch_statistics import warn_of_batch_statistics
from autopar.compiler.garbage_collection import uncollected
from autopar.compiler.lengths import Counting
from autopar.compiler.plan_cache import PlanCache
from autopar.compiler.tiles import Spaces, tiles_of
from autopar.costs.plans.plan import Context, Plan
from autopar.costs.space.space import Space
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout, replicated
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.record import choices_of
from autopar.planning.request import PlanRequest, axes_of_parts
from autopar.runtime.lengths.varying import Varying
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.module.executable import Executable
from autopar.runtime.module.inputs import Arguments, layouts_of, without_placements
from autopar.runtime.module.local_batch import Given
from autopar.runtime.module.parameters import Storage
from autopar.runtime.module.tree import Tree
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from autopar.runtime.ranks.agreement import from_first_rank, on_all_ranks
from autopar.runtime.recompute.random_state import RandomState
from autopar.runtime.rewrite.per_rank_graph import LocalProgram, rewrite
from autopar.runtime.rewrite.stored_order import columns_first
from autopar.runtime.step_graphs.kinds import bytes_of
from autopar.runtime.step_graphs.refusals import graph_is_required
from autopar.solver.deadline import Allowance


def compile_whole(
    model: nn.Module,
    mesh: DeviceMesh,
    request: PlanRequest,
    run: Run,
    made: Plan | PipelinePlan | None = None,
    kind: type[ParallelModule] = ParallelModule,
) -> ParallelModule:
    """Parallelize `model` over `mesh`, as a module of this kind.

    It runs a plan that was made before, or is planned when the first inputs are given.
    """
    check_no_pipeline(request, Mesh.of(mesh), made)
    plan = made if isinstance(made, Plan) else None
    return _Compiler(model, mesh, request, plan, run, kind).compiled()


M = TypeVar("M", ParallelModule, PipelineModule)


class ModuleCompiler(Generic[M]):
    """Compiler of one module: what its executables have in common, and how the model is traced for them."""

    module: M

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, request: PlanRequest, made: Plan | PipelinePlan | None, run: Run
    ) -> None:
        if made is not None:
            offload = "optimizer" if made.offloads_optimizer else "none"  # the plan names the offloaded tensors
            request = request.running(made.implementations).offloading_as(offload)
        self.mesh, self.request, self.run = mesh, request, run
        self.cache = PlanCache.of(request.settings.search.cache)
        self.tree = Tree(skeleton(model, request.precision))
        self.original: nn.Module | None = model
        """Until its parameters are laid out; then let go, so that its memory is free when the caller drops it."""
        self.warned = False
        """True if the user was warned that batch statistics are those of micro-batches."""
        self.storage: dict[str, Layout] = {}
        """Parameter → the layout in which it is stored, on whichever stage, since the first plan."""
        self.counting = Counting(self.tree, request, mesh)

    def make_module(self, random_state: RandomState) -> M:
        """Return the module that this makes executables for."""
        raise NotImplementedError

    def compiled(self) -> M:
        """Return the module for the model that was given, with whose values it begins."""
        assert self.original is not None
        module = self.make_module(RandomState.agreed(self.run.seed, self.run.deterministic, self.mesh))
        module.follow(self.original)
        return module

    def duplicate(self) -> M:
        """Return another module for the same model, without values; called by all ranks."""
        other = copy.copy(self)
        with self.tree.standing_in(self.tree.root.training) as model:
            other.tree, other.storage = Tree(skeleton(model)), dict(self.storage)
        other.counting = Counting(other.tree, self.request, self.mesh)
        return other.make_module(self.module.random_state.copied())

    def count_copies(self, arguments: Arguments, microbatches: int) -> None:
        """Have plans count the copies of so many micro-batches as this one, if steps are CUDA graphs."""
        if self.module.graphs_steps:
            copies = bytes_of(arguments) * microbatches
            self.request = replace(self.request, graph_input_bytes=copies).within(Mesh.of(self.mesh))

    @uncollected()
    def traced(self, arguments: Arguments, training: bool, frozen: frozenset[str] | None) -> Traced:
        """Return the graph of the model for inputs such as these."""
        with self.tree.standing_in(training) as model:
            freeze(model, frozen if self.request.training else frozenset(dict(model.named_parameters())))
            device = torch.device(self.mesh.device_type)
            return self.request.traced(model, *without_placements(arguments), device=device)


class _Compiler(ModuleCompiler[ParallelModule]):
    """Makes the executables of one module: one for each kind of inputs, mode and set of frozen parameters."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        request: PlanRequest,
        plan: Plan | None,
        run: Run,
        kind: type[ParallelModule],
    ) -> None:
        super().__init__(model, mesh, request, plan, run)
        self.plan, self.kind = plan, kind

    def make_module(self, random_state: RandomState) -> ParallelModule:
        request, mesh = self.request, Mesh.of(self.mesh)
        axes = axes_of_parts(request.inputs, mesh)
        self.module = self.kind(
            self.tree,
            self.mesh,
            self.prepare,
            self.capture,
            returned=request.returned(mesh),
            random_state=random_state,
            num_microbatches=request.microbatches or 1,
            given=Given(axes, self.run.check_inputs, request.static_argnames),
        )
        self.module.duplicate = self.duplicate
        if (required := graph_is_required(self.run.cuda_graph, self.mesh, request.training)) is not None:
            self.module.capture_steps(required)
        if (sizes := self.run.sizes) is not None:
            check_buckets(sizes, request.microbatches or 1, request.static_argnames)
            self.module.varying = Varying(sizes, mesh, axes)
        if not request.training:
            self.module.eval()
        return self.module

    def prepare(self, arguments: Arguments, training: bool, frozen: frozenset[str] | None) -> Executable:
        """Capture, plan and rewrite, for inputs such as these; what is returned runs."""
        allowance = Allowance.from_now(self.request.settings.search.time_limit)
        self.count_copies(arguments, self.request.microbatches or 1)
        varying = self.module.varying
        counted = None if varying is None else self.counting.of(arguments, training, varying.buckets)

        @functools.cache
        def traced() -> Traced:
            return self.traced(arguments, training, frozen)

        @functools.cache
        def captured(tiles: Tiles) -> Space:
            return self._space(traced(), tiles, arguments)

        def on_ranks(tiles: Tiles) -> Space:
            return on_all_ranks(
                lambda: captured(tiles),
                lambda found: found.program.summary,
                self.mesh,
                lambda found: found.program.lines(),
            )

        requested = self.request.tiles
        space = on_ranks(requested)
        plan = self._plan(space, captured, allowance)
        self.request = self.request.without_auto(plan.offloads_optimizer)  # one optimizer steps, whatever the inputs
        tiles = tiles_of(plan, space.program, requested, space.mesh)
        space = (space if tiles == requested else on_ranks(tiles)).with_zigzag_axes(plan.zigzag_axes)
        local = rewrite(space, choices_of(plan, space), plan.recompute)
        self._lay_out(space, local)
        executable = Executable.of(space.program, plan, local, self.mesh)
        if varying is not None and counted is not None:
            varying.counted[executable] = counted
        return executable

    def capture(self, arguments: Arguments, training: bool, frozen: frozenset[str] | None) -> Program:
        """Return the program for inputs such as these, before a plan takes losses or MLPs in tiles."""
        return self.traced(arguments, training, frozen).program(self.request.tiles)

    @uncollected()
    def _space(self, traced: Traced, tiles: Tiles, arguments: Arguments) -> Space:
        program = check_hooks(traced.program(tiles), self.request.microbatches or 1)
        return self.request.space(program, Mesh.of(self.mesh), layouts_of(program, arguments, self.mesh))

    def _plan(self, space: Space, spaces: Spaces, allowance: Allowance) -> Plan:
        """Return the plan that was given, for the first inputs, or that of the first rank, which alone can explain
        it.
        """
        contexts: list[Context | None] = []

        @uncollected()
        def solved() -> str:
            self.warned = self.warned or warn_of_batch_statistics(space.program, self.request.microbatches or 1)
            if self.plan is not None and self.original is not None:
                return self.plan.to_json()
            with allowance.searching():
                made = self.cache.plan(self.request, space, spaces, self.storage)
            contexts.append(made.context)
            return made.to_json()

        agreed = Plan.from_json(from_first_rank(solved, self.mesh))
        here = replace(agreed, workload=on_device(agreed.workload, self.mesh))
        return replace(here, context=contexts[0]) if contexts else here

    def _lay_out(self, space: Space, local: LocalProgram) -> None:
        """Store the parameters as the first plan says."""
        if self.original is None:
            return
        whole = replicated(self.mesh.ndim)
        self.storage.update(dict.fromkeys(self.tree.first_names, whole))
        self.storage.update({name: local.layouts[node] for name, node in space.program.parameters.items()})
        placeholders = columns_first(local.module.graph, space.program.parameters.values())
        storage = Storage(
            self.mesh,
            self.storage,
            whole,
            stores=self.request.precision.stores,
            columns_first=frozenset(n for n, node in space.program.parameters.items() if node in placeholders),
        )
        original, self.original = self.original, None
        self.module.lay_out(storage, original)
