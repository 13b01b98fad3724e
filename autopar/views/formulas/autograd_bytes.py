"""Growth of the bytes that autograd saves besides inputs and outputs: dropout masks, softmax sums, statistics.

Autograd is queried again at multiples of the symbols. A dim of what it saves grows as the dims of an input that it has
both sizes of, one or several in turn. A tensor with other dims grows with the largest input, and so does all if
autograd does not accept other sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from torch import fx

from autopar.costs.plans.expressions import evaluate
from autopar.ir.program.saved_tensors import saved_with
from autopar.ir.sharding.operation import Call
from autopar.views.formulas.symbols import BATCH, HIDDEN, SEQUENCE, Polynomial, Size

TIMES = ({BATCH: 2, SEQUENCE: 3, HIDDEN: 5}, {BATCH: 2, SEQUENCE: 3})
"""Multiples to query at, in turn: arguments may state the hidden size."""
Shapes = Sequence[tuple[int, ...]]


def hidden_bytes(node: fx.Node, call: Call, shapes: Shapes, num_bytes: int, symbols: Mapping[str, int]) -> Size:
    """Return the bytes of the whole call, which are `num_bytes` now, on inputs of these shapes."""
    largest = Size.of(math.prod(max(shapes, key=math.prod)))
    grown = ({name: value * times.get(name, 1) for name, value in symbols.items()} for times in TIMES)
    texts = [[str(Polynomial.of(size)) for size in shape] for shape in shapes]
    queried = ([tuple(int(evaluate(text, values)) for text in shape) for shape in texts] for values in grown)
    answered = ((each, found) for each in queried if (found := _saved_at(node, call, each)))
    then, after = next(answered, (shapes, ()))
    runs = [
        [math.prod(map(Size.of, shape[first:end]), start=Size.of(1)), math.prod(later[first:end])]
        for shape, later in zip(shapes, then, strict=True)
        for first, end in itertools.combinations(range(len(shape) + 1), 2)
    ]
    runs.sort(key=lambda run: len(run[0].polynomial.symbols))  # a number stands for itself
    known = {(int(size), later): size.polynomial for size, later in runs}
    found, counted = Polynomial(), 0
    for (shape, size), (others, _) in zip(_saved_at(node, call, shapes), after, strict=False):
        pairs = list(zip(shape, others, strict=True))
        if all(pair in known or pair[0] == pair[1] for pair in pairs):
            dims = [known.get(pair) or Polynomial.of(pair[0]) for pair in pairs]
            found, counted = found + math.prod(dims, start=Polynomial.of(size)), counted + math.prod(shape) * size
    # Copies of inputs that are not contiguous are saved, too.
    return Size.make(num_bytes, found + largest.polynomial * Fraction(num_bytes - counted, int(largest)))


def _saved_at(node: fx.Node, call: Call, shapes: Shapes) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the tensors saved of inputs of these shapes; none if the call does not take them."""
    pairs = zip(call.inputs, shapes, strict=True)
    try:
        return saved_with(node, tuple(replace(info, shape=tuple(map(int, shape))) for info, shape in pairs)).others
    except RuntimeError:  # an argument states a size of now
        return ()
