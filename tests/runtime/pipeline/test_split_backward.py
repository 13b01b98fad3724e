"""A backward in two halves gives what a whole backward gives, on random graphs and on the shapes that stages have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from autopar.runtime.pipeline.split_backward import WeightGroup, backward_to_inputs, backward_to_weights

SIZE = 3
NUM_INPUTS, NUM_WEIGHTS = 2, 3
Graph = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""(inputs, weights) → outputs."""

OPERATIONS: tuple[Callable[[Tensor, Tensor], tuple[Tensor, ...]], ...] = (
    lambda a, b: (a @ b,),
    lambda a, b: (a + b,),
    lambda a, b: (a * b,),
    lambda a, b: (a.tanh(),),
    lambda a, b: (a.t(),),
    lambda a, b: (a.detach(),),
    # Several outputs of one node.
    lambda a, b: tuple(part.sum(0).expand(SIZE, SIZE) for part in torch.split(a * b, [1, SIZE - 1])),
    lambda a, b: (torch.cat([torch.unbind(a)[1][None], torch.unbind(b)[0].expand(2, SIZE)]),),
)


def _matrix(seed: int) -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _leaves(learning: Sequence[bool]) -> list[Tensor]:
    return [_matrix(seed).requires_grad_(learns) for seed, learns in enumerate(learning)]


def _halves_equal_the_whole(
    graph: Graph, learning: Sequence[bool], gradients: Sequence[bool] | None, rounds: int = 1
) -> list[list[WeightGroup]]:
    """Compare both backwards of `rounds` micro-batches; `gradients` says which outputs are given one."""
    assert len(learning) == NUM_INPUTS + NUM_WEIGHTS
    split, whole = _leaves(learning), _leaves(learning)
    found: list[list[WeightGroup]] = []
    for number in range(rounds):
        pairs = []
        for leaves in (split, whole):
            inputs = [(x.detach() + number).requires_grad_(x.requires_grad) for x in leaves[:NUM_INPUTS]]
            pairs.append((inputs, graph(inputs, leaves[NUM_INPUTS:])))
        (inputs, outputs), (other_inputs, other_outputs) = pairs
        sent = [torch.ones_like(each) for each in outputs]
        if gradients is not None:
            sent = [_matrix(seed).reshape(each.shape) for seed, each in enumerate(outputs, 100)]
        has = [True] * len(outputs) if gradients is None else gradients
        own = None if gradients is None else [g if given else None for g, given in zip(sent, has, strict=True)]
        to_inputs, groups = backward_to_inputs(outputs, own, inputs, split[NUM_INPUTS:])
        backward_to_weights(groups)
        used = [
            (output, gradient)
            for output, gradient, given in zip(other_outputs, sent, has, strict=True)
            if given and output.requires_grad
        ]
        if used:
            torch.autograd.backward([output for output, _ in used], [gradient for _, gradient in used])
        for ours, theirs in zip(to_inputs, other_inputs, strict=True):
            assert_close(ours, theirs.grad)
        for ours, theirs in zip(split[NUM_INPUTS:], whole[NUM_INPUTS:], strict=True):
            assert_close(ours.grad, theirs.grad)
        found.append(groups)
    return found


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, int]:
    """A graph of random calls, and the number of its outputs: any of its tensors, inputs and weights among them."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0), st.integers(0)), min_size=1, max_size=8)
    )
    taken = draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))

    def graph(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        known = [*inputs, *weights]
        for operation, a, b in steps:
            known += OPERATIONS[operation](known[a % len(known)], known[b % len(known)])
        return [known[-1 - number % len(known)] for number in taken]

    return graph, len(taken)


@settings(max_examples=120, deadline=None)
@given(
    graphs(),
    st.lists(st.booleans(), min_size=NUM_INPUTS, max_size=NUM_INPUTS),
    st.lists(st.booleans(), min_size=NUM_WEIGHTS, max_size=NUM_WEIGHTS),
    st.none() | st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_two_halves_give_what_a_whole_backward_gives(
    graph: tuple[Graph, int], inputs: list[bool], weights: list[bool], gradients: list[bool] | None
) -> None:
    make, count = graph
    _halves_equal_the_whole(make, [*inputs, *weights], None if gradients is None else gradients[:count])


ALL = (True,) * (NUM_INPUTS + NUM_WEIGHTS)
SHAPES: dict[str, tuple[Graph, tuple[bool, ...]]] = {
    "a weight used twice": (lambda x, w: [(x[0] @ w[0]).tanh() @ w[0] + x[1] @ w[1] * w[2]], ALL),
    "a weight beside all inputs": (lambda x, w: [(x[0] @ w[0]).tanh() * x[1], (w[1] @ w[2]).tanh()], ALL),
    "a weight below an input's path and beside it": (lambda x, w: [x[0] @ w[0].tanh() + x[1], w[0].exp() * w[1]], ALL),
    "an output that is an input": (lambda x, w: [x[0], x[1] @ w[0] * w[1] + w[2]], ALL),
    "an output twice": (lambda x, w: [y := x[0] @ w[0], y, z := w[1] @ w[2], z], ALL),
    "an output that is a weight": (lambda x, w: [w[0], x[0] @ w[0] @ w[1]], ALL),
    "no input that learns": (lambda x, w: [(x[0] @ w[0]).tanh() @ w[1] @ w[2]], (False, False, True, True, True)),
    "no weight that learns": (lambda x, w: [(x[0] @ w[0]).tanh() @ x[1]], (True, True, False, False, False)),
    "nothing that learns": (lambda x, w: [x[0] @ w[0]], (False,) * 5),
    "an unused input and an unused weight": (lambda x, w: [x[0] @ w[0]], ALL),
    "one beginning below another": (lambda x, w: [((x[0] @ w[0]).tanh() @ (w[0] @ w[1])).tanh() * w[1]], ALL),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rounds", [1, 3])
def test_stages_of_every_shape_are_split(name: str, rounds: int) -> None:
    graph, learning = SHAPES[name]
    _halves_equal_the_whole(graph, learning, None, rounds)
    outputs = graph(_leaves(ALL)[:NUM_INPUTS], _leaves(ALL)[NUM_INPUTS:])
    _halves_equal_the_whole(graph, learning, [True] * len(outputs), rounds)


def test_the_first_half_computes_no_gradient_of_a_weight() -> None:
    inputs, weights = _leaves(ALL)[:NUM_INPUTS], _leaves(ALL)[NUM_INPUTS:]
    reached: list[int] = []
    for number, weight in enumerate(weights):
        weight.register_hook(lambda _, n=number: reached.append(n))
    outputs = [((inputs[0] @ weights[0].exp()).tanh() * weights[1] + weights[2]).sum()]
    _, groups = backward_to_inputs(outputs, None, inputs, weights)
    assert reached == [] and all(weight.grad is None for weight in weights)
    backward_to_weights(groups)
    assert sorted(reached) == [0, 1, 2]


def test_weights_with_a_beginning_in_common_are_done_together() -> None:
    groups = _halves_equal_the_whole(lambda x, w: [torch.addmm(w[0], x[0], w[1]) * w[2]], ALL, None)[0]
    assert sorted(len(group.weights) for group in groups) == [1, 2]


def test_gradients_of_low_precision_are_added_up_in_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(SIZE, SIZE, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    for _ in range(300):
        x = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
        backward_to_weights(backward_to_inputs([x * weight], None, [x], [weight])[1])
    # In bfloat16, 256 + 1 is 256.
    assert_close(weight.grad, torch.full((SIZE, SIZE), 300.0))
