"""Planning of generation on a mesh that need not exist: plans of a token and of a prompt over one storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate
from torch import nn

from autopar.capture.export import skeleton_of
from autopar.compiler.inference import cached_forward
from autopar.compiler.inference.layouts import best_laid, caches_of, laid, program_of
from autopar.compiler.inference.state import CacheSizes, described
from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.plan import Plan
from autopar.errors import AnnotationError, InfeasibleError, InputError
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.record import choices_of
from autopar.planning.request import PlanRequest

SHOWN = 60  # characters of a reason


@dataclass(frozen=True, slots=True)
class Load:
    """Workload of generation: `batch` prompts at once, of `prompt` tokens each, with `tokens` new ones each."""

    batch: int
    prompt: int
    tokens: int

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("prompt", 2), ("tokens", 1)):
            found = getattr(self, name)
            if type(found) is not int or found < least:
                raise InputError(f"{name}={found!r}; give a whole number of at least {least}.")

    @property
    def length(self) -> int:
        """Positions of the cache."""
        return self.prompt + self.tokens


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The plans of one token a sample and of all prompts but their last token, and where the cache lies."""

    load: Load
    token: Plan
    prompt: Plan
    cache: Layout
    cache_bytes: int
    """On a device."""
    others: str = ""
    """A table of the meshes that were compared."""

    @property
    def seconds_to_first(self) -> float:
        """Until each sample has its first new token."""
        return self.prompt.seconds + self.token.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all samples together, once the prompts are read."""
        return self.load.batch / self.token.seconds

    @property
    def peak_bytes(self) -> int:
        """On a device, at its fullest moment in both plans."""
        return max(self.token.peak_bytes, self.prompt.peak_bytes)

    def __str__(self) -> str:
        load, mesh = self.load, self.token.mesh
        return "\n".join(
            (
                f"generation on {mesh}: {load.batch} prompts of {load.prompt} tokens, {load.tokens} new ones each",
                f"first token   {format_seconds(self.seconds_to_first)}",
                f"each further  {format_seconds(self.token.seconds)}, {self.tokens_per_second:,.0f} tokens/s",
                f"cache         {format_bytes(self.cache_bytes)} per device: {described(self.cache, mesh)}",
                f"memory        {self.token.reserved.both(self.peak_bytes)} per device at the fullest moment",
                *((f"\nthe best of these meshes:\n{self.others}",) if self.others else ()),
            )
        )


def plan_for(model: nn.Module, mesh: Mesh, load: Load, request: PlanRequest) -> GenerationPlan:
    """Return the best plan of a token, and that of prompts over the same stored weights and the same cache.

    Raises InputError for a model that does not generate with a cache, and what planning raises.
    """
    if not cached_forward.generates(model):
        raise InputError(
            f"a {type(model).__name__} is no language model of transformers with a generate of its own; give one, as "
            "AutoModelForCausalLM.from_config(config) on the meta device."
        )
    request = request.within(mesh)
    sizes = CacheSizes(cached_forward.layers_of(model), load.batch, load.length, _dtype(model, request))
    made: Any = skeleton_of(model, request.precision, False)
    made.__class__ = cached_forward.with_cache(type(made))
    program = program_of(made, request, sizes, 1)
    found = best_laid(program, request, mesh, sizes)
    storage = _stored(program, found.plan, request, mesh, sizes, found.layout)
    prompt = laid(program_of(made, request, sizes, load.prompt - 1), request, mesh, sizes, found.layout, storage)
    num_bytes = sizes.num_bytes(found.layout, mesh.sizes)
    return GenerationPlan(load, found.plan, prompt.plan, found.layout, num_bytes)


def best_for(
    model: nn.Module, meshes: Sequence[Mesh], load: Load, request: PlanRequest, within: float | None
) -> GenerationPlan:
    """Return the plan of the most tokens per second on any of the meshes, whose first token comes `within` so many
    seconds.

    Raises InfeasibleError with what each mesh has, where none has such a plan.
    """
    found: list[GenerationPlan] = []
    rows = []
    for mesh in meshes:
        try:
            plan = plan_for(model, mesh, load, request)
        except (AnnotationError, InfeasibleError) as error:
            rows.append([str(mesh), *["-"] * 4, str(error).partition("\n")[0][:SHOWN]])
            continue
        late = within is not None and plan.seconds_to_first > within
        if not late:
            found.append(plan)
        first, message = format_seconds(plan.seconds_to_first), "the first token comes too late" if late else ""
        tokens, memory = f"{plan.tokens_per_second:,.0f}", format_bytes(plan.peak_bytes)
        rows.append([str(mesh), first, tokens, memory, described(plan.cache, mesh), message])
    table = tabulate(rows, ["mesh", "first token", "tokens/s", "memory", "cache", ""], disable_numparse=True)
    if not found:
        requested = f" whose first token comes within {format_seconds(within)}" if within is not None else ""
        raise InfeasibleError(
            f"no mesh of {meshes[0].num_devices} devices has a plan{requested}; on each of them:\n{table}\nGive more "
            "devices, fewer prompts at once, or a later limit."
        )
    return replace(max(found, key=lambda each: each.tokens_per_second), others=table)


def _dtype(model: nn.Module, request: PlanRequest) -> Any:
    floating = (each.dtype for each in model.parameters() if each.is_floating_point())
    return request.precision.computes(request.precision.stores(next(floating)))


def _stored(
    program: Program, plan: Plan, request: PlanRequest, mesh: Mesh, sizes: CacheSizes, layout: Layout
) -> dict[str, Layout]:
    """Map each parameter to the layout in which a plan stores it."""
    arriving = dict.fromkeys(caches_of(program, sizes), layout)
    space = request.space(program, mesh, arriving, zigzag_axes=plan.zigzag_axes)
    choices = choices_of(plan, space)
    numbers = {name: space.index[node] for name, node in program.parameters.items()}
    chosen = {name: space.decisions[number].candidates.strategies[choices[number]] for name, number in numbers.items()}
    return {name: strategy.outputs[0] for name, strategy in chosen.items()}
