"""Capture of a step as a CUDA graph, after runs on a side stream.

Autograd adds gradients up on the stream on which a parameter was first used in a graph of autograd. So steps run before
the capture on the stream that captures (PyTorch's notes on whole-network capture). All graphs of a step take memory
from one pool: what one of them gives lasts, and what it needs between is used by the others, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Runs steps, and captures one so that it can be replayed."""

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run a step as it will be captured, and return its result."""
        ...

    def capture(self, step: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Callable[[], None]]:
        """Return the result of a step, which has no values before the first replay, and the replay.

        A replay draws by what seeds the `generators` have then.
        """
        ...


class CudaRecorder:
    """Recorder of CUDA graphs, on a stream of its own."""

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run a step on the stream that captures, between what the current one has before and after."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                return step()
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, step: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Callable[[], None]]:
        """Capture a step; threads that look after collectives may call CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        for each in generators:
            graph.register_generator_state(each)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()
        return result, graph.replay
