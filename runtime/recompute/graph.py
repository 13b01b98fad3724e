"""A per-rank graph and the ways to run it: as it is, with segments computed again, and as torch.compile makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from autopar.errors import InputError
from autopar.runtime.ranks.uncompiled import uncompiled
from autopar.runtime.recompute.regions import in_regions
from autopar.runtime.recompute.run import run, steps_of

TorchCompile = Callable[[fx.GraphModule], Callable[..., Any]]
"""`torch.compile` with its options."""


def compiling() -> bool:
    """Whether torch.compile has been put around the caller."""
    return get_eval_frame_callback() not in (None, False)


class RankGraph:
    """A per-rank graph, which runs on the values of its placeholders."""

    def __init__(self, module: fx.GraphModule, has_hooks: bool, ahead: fx.GraphModule | None = None) -> None:
        """`has_hooks`: whether the model's forward registers gradient hooks.

        `ahead` is the graph as it runs without torch.compile, which issues gathers where it wants them.
        """
        self.module = module
        self.ahead = module if ahead is None else ahead
        self._has_hooks = has_hooks
        steps = steps_of(self.ahead.graph)
        self._recomputing = steps if any(step.role is not None for step in steps) else ()
        self.regathers = any(node.kwargs.get("regather") for node in module.graph.nodes)
        """Whether some gathered weights are freed after use and gathered again in the backward."""
        self._compiled: dict[tuple[TorchCompile, bool], Callable[..., Any]] = {}

    @uncompiled
    def runner(self, torch_compile: TorchCompile | None, compiling: bool = False) -> Callable[..., Any]:
        """What runs the graph, with a backward where gradients are on; with `torch_compile`, as that makes it.

        `compiling`: whether torch.compile has been put around the caller.

        Raises InputError where torch.compile would trace once what is to run every time.
        """
        learns = torch.is_grad_enabled()
        if torch_compile is None and not compiling:
            return self._run_again if self._recomputing and learns else self.ahead
        if self._has_hooks and learns:
            raise InputError(
                "torch.compile runs a model whose forward registers gradient hooks, which it would trace once; run the "
                "model without torch.compile, or register the hooks on parameters."
            )
        module = self._in_regions if learns else self.module
        if torch_compile is None:
            return module
        key = torch_compile, learns
        if key not in self._compiled:
            self._compiled[key] = torch_compile(module)
        return self._compiled[key]

    def _run_again(self, *inputs: Any) -> Any:
        return run(self.ahead.graph, self._recomputing, inputs)

    @cached_property
    def _in_regions(self) -> fx.GraphModule:
        """The graph as torch.compile is to see it."""
        return in_regions(self.module.graph) if self._recomputing or self.regathers else self.module
