"""Values that claims are on: how long they and the tensors that a second run begins with are there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.recompute import saved_handles
from tests.runtime.recompute.test_recompute import assert_equal, blocks, loss_of

Storage = weakref.ref[torch.UntypedStorage]


def _loss() -> tuple[Tensor, tuple[Tensor, ...]]:
    model = blocks(lambda x: x.tanh().sin())
    return loss_of(model.forward("selective", model.inputs())), model.learned


def _nodes(root: Any) -> Iterator[Any]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [each for each, _ in node.next_functions if each is not None]


@pytest.mark.parametrize("retains", [True, False])
def test_what_a_second_run_begins_with_is_let_go_unless_the_graph_is_retained(
    retains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of a product is saved to make a tanh again, whose backward does not need it."""
    began, stays = list[Storage](), dict[str, bool]()
    again = saved_handles.Frame._run_again

    def noting(frame: Any) -> None:
        began.extend(weakref.ref(each.value().untyped_storage()) for each in frame._held.values())
        again(frame)

    monkeypatch.setattr(saved_handles.Frame, "_run_again", noting)
    loss, _ = _loss()
    tanh = next(node for node in _nodes(loss.grad_fn) if node.name() == "TanhBackward0")
    tanh.register_prehook(lambda _: stays.update(tanh=began[0]() is not None))
    loss.backward(retain_graph=retains)
    assert stays == {"tanh": retains}


def test_a_backward_may_read_what_is_saved_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of users may, and the tensors from outside are gone by then."""
    expected = torch.autograd.grad(*_loss())
    runs: list[object] = []
    again = saved_handles.Frame._run_again
    monkeypatch.setattr(saved_handles.Frame, "_run_again", lambda frame: (runs.append(frame), again(frame)))
    loss, learned = _loss()

    def read(_: Tensor) -> None:
        for node in _nodes(loss.grad_fn):
            for name in dir(node):
                if name in ("_saved_self", "_saved_result"):
                    getattr(node, name)

    loss.register_hook(read)
    assert_equal(torch.autograd.grad(loss, learned), expected)
    assert len(runs) == 2, "each segment runs again once"
