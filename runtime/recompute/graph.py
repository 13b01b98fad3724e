"""A per-rank graph and its execution: as it is, with segments computed again, and as torch.compile makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

from autopar.errors import InputError
from autopar.runtime.recompute.marks import is_offloaded, role_of
from autopar.runtime.recompute.module_ranges import is_watched
from autopar.runtime.recompute.prepared_calls import code_of
from autopar.runtime.recompute.regions import in_regions
from autopar.runtime.recompute.run import run, steps_of


@dataclass(frozen=True, slots=True)
class Compilation:
    """Options given to a model's `compile`."""

    torch_compile: Callable[[fx.GraphModule], Callable[..., Any]]
    """`torch.compile` with its options."""
    by_layers: bool
    """True if layers are compiled one by one, equal ones once."""

    def __str__(self) -> str:
        return "layer by layer" if self.by_layers else "the whole graph"


InLayers = Callable[[fx.Graph, Callable[[fx.Graph], Callable[..., Any]]], fx.Graph]
"""(graph, what makes a layer's graph run) → the graph with a call for each layer"""


def compiler_around() -> Any:
    """Return what torch.compile calls for each frame below the caller; None where it is not around the caller."""
    return get_eval_frame_callback() or None


def called_below(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as if torch.compile were around it with this `compiler`, out of whose sight the caller is."""
    if compiler is None:
        return function(*args, **kwargs)
    before = set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        set_eval_frame(before)


class RankGraph:
    """A per-rank graph, which runs on the values of its placeholders."""

    def __init__(
        self,
        module: fx.GraphModule,
        has_hooks: bool,
        in_layers: InLayers,
        ahead: fx.GraphModule | None = None,
        eager: fx.GraphModule | None = None,
    ) -> None:
        """`has_hooks`: whether the model's forward registers gradient hooks.

        `ahead` is the graph as it runs where it issues gathers itself: torch.compile does where it has all of it.
        `eager` is the same where nothing is compiled.
        """
        self.module = module
        self.ahead = module if ahead is None else ahead
        self._eager = self.ahead if eager is None else eager
        self._has_hooks = has_hooks
        self._in_layers = in_layers
        self._steps = steps_of(self._eager.graph)
        self.regathers = any(node.kwargs.get("regather") for node in module.graph.nodes)
        """True if some gathered weights are freed after use and gathered again in the backward."""
        self._compiled: dict[tuple[Compilation, bool], Callable[..., Any]] = {}

    def runner(self, compilation: Compilation | None, compiling: bool = False) -> Callable[..., Any]:
        """Return a callable that runs the graph, with a backward if gradients are on; compiled if given `compilation`.

        `compiling`: torch.compile has been put around the caller.

        Raises InputError if torch.compile would trace only once what has to run every time, or if it cannot offload
        what the plan offloads.
        """
        learns = torch.is_grad_enabled()
        if compilation is None and not compiling:
            call_by_call = (self._steps.recomputes and learns) or is_watched()
            return partial(run, self._steps) if call_by_call else self._code
        by_layers = compilation is not None and compilation.by_layers
        if learns and not by_layers and self._steps.offloads:
            raise InputError(
                "torch.compile decides itself what a backward of the whole graph keeps, and the plan sends what layers "
                "keep to the host; compile layer by layer, by model.compile(regional=True), run the model without "
                'torch.compile, or plan with Memory(offload="optimizer") or "none".'
            )
        if self._has_hooks and learns:
            raise InputError(
                "torch.compile runs a model whose forward registers gradient hooks, which it would trace once; run the "
                "model without torch.compile, or register the hooks on parameters."
            )
        if compilation is None:
            return self._as_compiled(learns)
        key = compilation, learns
        if key not in self._compiled:
            self._compiled[key] = (
                self._by_layers(compilation, learns)
                if compilation.by_layers
                else compilation.torch_compile(self._as_compiled(learns))
            )
        return self._compiled[key]

    @cached_property
    def _code(self) -> Callable[..., Any]:
        return code_of(self._eager)

    def _as_compiled(self, learns: bool) -> fx.GraphModule:
        return self._regions if learns and (self._steps.recomputes or self.regathers) else self.module

    @cached_property
    def _regions(self) -> fx.GraphModule:
        return in_regions(self.module.graph)

    def _by_layers(self, compilation: Compilation, learns: bool) -> Callable[..., Any]:
        """Return the graph with layers compiled, and the rest as it runs without torch.compile."""

        def made(layer: fx.Graph) -> Callable[..., Any]:
            again = learns and any(role_of(node) is not None and not is_offloaded(node) for node in layer.nodes)
            return compilation.torch_compile(in_regions(layer) if again else fx.GraphModule(nn.Module(), layer))

        graph = self._in_layers(self.ahead.graph, made)
        return partial(run, steps_of(graph))
