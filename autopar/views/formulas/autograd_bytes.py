"""Growth of the bytes that autograd saves besides inputs and outputs: dropout masks, softmax sums, statistics.

These are known only as a number of bytes. So autograd is queried again at multiples of the batch and the sequence, and

    bytes = Σ c_ij · batch^i · sequence^j      i ≤ 1, j ≤ 2

is fitted through its answers. A coefficient that is 4, 8, 1 or 2 bytes for each element of further dims of the largest
input grows with these dims. If autograd does not accept other sizes, the bytes grow with the largest input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from autopar.costs.plans.expressions import evaluate
from autopar.costs.space.space import Decision
from autopar.ir.program.saved_tensors import saved_with
from autopar.ir.sharding.operation import Call
from autopar.views.formulas.symbols import BATCH, SEQUENCE, Polynomial, Size

BYTES_PER_ELEMENT = (4, 8, 1, 2)  # float32 statistics, two of them, a mask, half precision
DEGREES = ((BATCH, 1), (SEQUENCE, 2))
Shapes = Sequence[tuple[int, ...]]


def hidden_bytes(decision: Decision, call: Call, shapes: Shapes, num_bytes: int, symbols: Mapping[str, int]) -> Size:
    """Return the bytes of the whole call, which are `num_bytes` now, on inputs of these shapes."""
    largest = max(shapes, key=math.prod)
    batches, sequences = (range(1, degree + 2 if name in symbols else 2) for name, degree in DEGREES)
    values = [[_bytes_at(decision, call, shapes, symbols, (i, j)) for j in sequences] for i in batches]
    elements = Size.of(math.prod(largest))
    if any(value is None for row in values for value in row):
        return Size.make(num_bytes, elements.polynomial * Fraction(num_bytes, int(elements)))
    of_sequence = [_interpolation([Fraction(value or 0) for value in row]) for row in values]
    terms = []
    for j, column in enumerate(zip(*of_sequence, strict=True)):
        for i, value in enumerate(_interpolation(column)):
            names = [BATCH] * i + [SEQUENCE] * j
            grown = Size.of(math.prod(Size.symbol(name, symbols[name]) for name in names))
            terms.append(grown.polynomial * _coefficient(value / int(grown), largest))
    # Asked of contiguous inputs; of those that lie otherwise in memory, copies are saved.
    copies = num_bytes - (values[0][0] or 0)
    terms.append(elements.polynomial * Fraction(copies, int(elements)))
    return Size.make(num_bytes, Polynomial.sum(terms))


def _interpolation(values: Sequence[Fraction]) -> list[Fraction]:
    """Return the coefficients, constant first, of the polynomial that has these one to three values at 1, 2 and 3."""
    first = values[0]
    if len(values) == 1:
        return [first]
    square = (values[2] - 2 * values[1] + first) / 2 if len(values) == 3 else Fraction(0)
    slope = values[1] - first - 3 * square
    return [first - slope - square, slope, square][: len(values)]


def _bytes_at(
    decision: Decision, call: Call, shapes: Shapes, symbols: Mapping[str, int], times: tuple[int, ...]
) -> int | None:
    """Return the bytes at multiples of batch and sequence; None where the call does not take such inputs."""
    more = {name: m for (name, _), m in zip(DEGREES, times, strict=True)}
    values = {name: value * more.get(name, 1) for name, value in symbols.items()}
    infos = []
    for info, shape in zip(call.inputs, shapes, strict=True):
        sizes = [evaluate(str(Polynomial.of(size)), values) for size in shape]
        infos.append(replace(info, shape=tuple(map(int, sizes))))
    try:
        return saved_with(decision.node, tuple(infos)).other_bytes
    except RuntimeError:  # an argument states a size of now
        return None


def _coefficient(value: Fraction, shape: tuple[int, ...]) -> Polynomial:
    dims = [size for size in shape if not Polynomial.of(size).symbols & {BATCH, SEQUENCE}]
    for each in BYTES_PER_ELEMENT:
        for count in range(len(dims) + 1):
            for some in itertools.combinations(dims, count):
                if math.prod(map(int, some)) * each == value:
                    return Polynomial.of(math.prod(some, start=Size.of(each)))
    return Polynomial.of(value)
