"""Rules: one line per operation that says along which factors it may be split.

    "~... k, ~o k, +o -> ... o"          linear: input, weight, bias -> output

An operation is an einsum over named factors. Terms stand for tensors, names for factors, in the order of the dims:

    k        a dim that is one factor                 (h d)    a dim made of two factors, the outer one first
    ...      any number of leading dims               _        a dim that must stay whole
    1        a dim of size one                        ()       a tensor without dims: an empty term
    ; q = h r    behind the rule: a name for all of (h r) at once, which a choice of an axis may split

Splitting factor f over a mesh axis splits every dim whose outermost factor is f, asks R of the inputs that lack f,
and gives P on the outputs that lack it (a name missing on the right is summed). Marks before a term:

    +        the term is added: where the output is partial, so must it be (bias; both sides of a sum)
    ~        the operation is linear in the term: a partial input gives a partial output

A factor named o is a column of the operation, k a row, x an expert; other factors take the role of the dim they
stand on. The notation follows einops, the semantics the factor rules of Shardy (OpShardingRule).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.ir.sharding.layout import I, P, Placement, R, S

ELLIPSIS = "..."
WHOLE = "_"
ROLE_OF_FACTOR = {"o": "column", "k": "row", "x": "expert"}
NONE, PASS_REPLICATED, PASS_PARTIAL, TOGETHER, ANY_OF = "-", "R", "P", "+", "&"
VIA = " via "
"""Stands between a choice and the name of the implementation that it is taken by."""

_TOKEN = re.compile(r"\(|\)|\.\.\.|…|(_|1|[a-z][a-z0-9]*)(?!\w)")


@dataclass(frozen=True, slots=True)
class Term:
    """The factors of one tensor's dims, outermost factor first; `("_",)` is a whole dim, `("1",)` one of size one."""

    dims: tuple[tuple[str, ...], ...]
    mark: str = ""

    def __str__(self) -> str:
        words = [dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in self.dims]
        return self.mark + (" ".join(words) or "()")

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor of the term, without whole dims and dims of size one."""
        return tuple(name for dim in self.dims for name in dim if name not in (WHOLE, "1"))

    def dim_of(self, factor: str) -> int | None:
        """Return the dim that is split when `factor` is: the one where it is outermost, None if the term lacks it."""
        for index, dim in enumerate(self.dims):
            if dim[0] == factor:
                return index
        return None


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of one mesh axis for one operation: the placement required of each input and given to each output.

    `name` is a factor, several that are split together ("t+x"), or "-" (not split), "R" (passes replicated values),
    "P0" (passes input 0 as a partial value), "P+" (passes all added terms as partial values).
    """

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors that are split."""
        return factors_of(self.name)


def factors_of(choice: str) -> tuple[str, ...]:
    """Return the factors that a choice of this name splits, by whatever implementation.

    >>> factors_of("t+x"), factors_of("t+x via exchange"), factors_of("P0")
    (('t', 'x'), ('t', 'x'), ())
    """
    splits = choice != NONE and choice[0] not in (PASS_REPLICATED, PASS_PARTIAL)
    return tuple(choice.partition(VIA)[0].split(TOGETHER)) if splits else ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed rule. `str(Rule.parse(text))` prints it in canonical form."""

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    products: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names for several factors at once, each with these factors, the outermost first."""

    def __str__(self) -> str:
        products = [f"; {name} = {' '.join(members)}" for name, members in self.products]
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}{''.join(products)}"

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule.

        >>> print(Rule.parse("b … k,o k->b … o"))
        b ... k, o k -> b ... o

        Raises RuleError with the position of the first thing that cannot be read.
        """
        return _parse(text)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance."""
        return tuple(dict.fromkeys(f for term in (*self.inputs, *self.outputs) for f in term.factors))

    def bind(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> BoundRule:
        """Fit the rule to shapes: expand `...`, find the size of every factor, check that they agree.

        Raises RuleError naming the term, the dim and both sizes where they do not.
        """
        return _bind(self, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)))


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule whose factors have sizes."""

    rule: Rule
    sizes: Mapping[str, int]

    @property
    def splittable(self) -> tuple[str, ...]:
        """Factors that can be split: outermost wherever they appear, and larger than one."""
        terms = (*self.rule.inputs, *self.rule.outputs)
        inner = {name for term in terms for dim in term.dims for name in dim[1:]}
        return tuple(f for f in self.rule.factors if f not in inner and self.sizes[f] > 1)

    def choices(
        self, joined: frozenset[str] = frozenset(), weight_only: bool = False, stated: tuple[Choice, ...] = ()
    ) -> tuple[Choice, ...]:
        """Return every choice of one mesh axis, regardless of sizes; the implementation itself sums `joined` factors.

        `stated` are choices that the notation cannot say; one takes the place of the notation's own of its name.

        Any operation may pass replicated values: each rank sends its part of the gradient back, to be summed later. It
        is offered where that pays: to what computes on weights alone, so that the gradients of parameters are summed,
        and to linear operations of one input.
        """
        none = Choice(NONE, (I,) * len(self.rule.inputs), (I,) * len(self.rule.outputs))
        names = {choice.name for choice in stated}
        split = [self._split(f, joined) for f in self.splittable if f not in names]
        return (*split, *stated, none, *self._passes(weight_only))

    def _split(self, factor: str, joined: frozenset[str]) -> Choice:
        partial = factor not in joined and any(term.dim_of(factor) is None for term in self.rule.outputs)

        def of_input(term: Term) -> Placement:
            dim = term.dim_of(factor)
            if dim is not None:
                return S(dim)
            return P if partial and term.mark == "+" else R

        def of_output(term: Term) -> Placement:
            dim = term.dim_of(factor)
            if dim is not None:
                return S(dim)
            return I if factor in joined else P

        return Choice(factor, tuple(map(of_input, self.rule.inputs)), tuple(map(of_output, self.rule.outputs)))

    def _passes(self, weight_only: bool) -> list[Choice]:
        inputs = self.rule.inputs
        outputs = (P,) * len(self.rule.outputs)
        found = []
        if weight_only or (len(inputs) == 1 and inputs[0].mark):
            found.append(Choice(PASS_REPLICATED, (R,) * len(inputs), (R,) * len(outputs)))
        if all(term.mark == "+" for term in inputs) and inputs:
            found.append(Choice(f"{PASS_PARTIAL}+", (P,) * len(inputs), outputs))
        for index, term in enumerate(inputs):
            if term.mark == "~":
                requested = tuple(P if i == index or other.mark == "+" else R for i, other in enumerate(inputs))
                found.append(Choice(f"{PASS_PARTIAL}{index}", requested, outputs))
        return found


@functools.cache
def _parse(text: str) -> Rule:
    if text.count("->") != 1:
        raise RuleError(f'rule "{text}": found {text.count("->")} arrows, needed one: "inputs -> outputs".')
    body, *products = text.split(";")
    left, right = body.split("->")
    rule = Rule(_parse_terms(left, text), _parse_terms(right, text))
    rule = Rule(rule.inputs, rule.outputs, tuple(_parse_product(each, rule, text) for each in products))
    for term in rule.outputs:
        if term.mark:
            raise RuleError(f'rule "{text}": the output "{term}" has a mark; marks belong to inputs.')
        inputs = {f for t in rule.inputs for f in t.factors}
        if ELLIPSIS in term.factors and ELLIPSIS not in inputs:
            raise RuleError(f'rule "{text}": "..." stands on the right only; name those dims on the left too.')
    return rule


def _parse_product(text: str, rule: Rule, whole: str) -> tuple[str, tuple[str, ...]]:
    name, _, members = text.partition("=")
    name, factors = name.strip(), tuple(members.split())
    if not _TOKEN.fullmatch(name) or name in rule.factors or not factors or not set(factors) <= set(rule.factors):
        raise RuleError(
            f'rule "{whole}": cannot read "{text.strip()}"; behind ";" stands a new name for several of the factors '
            f'{", ".join(rule.factors)}: "q = h r".'
        )
    return name, factors


def _parse_terms(side: str, rule: str) -> tuple[Term, ...]:
    """Return the terms of one side; a blank side has none (an operation that makes a tensor from nothing)."""
    return tuple(_parse_term(part.strip(), rule) for part in side.split(",")) if side.strip() else ()


def _parse_term(text: str, rule: str) -> Term:
    mark = text[:1] if text[:1] in ("+", "~") else ""
    body = text[len(mark) :]
    if body.strip() == "()":
        return Term((), mark)
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    position = 0
    while position < len(body):
        if body[position].isspace():
            position += 1
            continue
        match = _TOKEN.match(body, position)
        if not match:
            raise RuleError(f'rule "{rule}": cannot read "{body[position:]}" in the term "{text}".')
        token, position = match.group().replace("…", ELLIPSIS), match.end()
        if token == "(":
            if group is not None:
                raise RuleError(f'rule "{rule}": a group inside a group in the term "{text}".')
            group = []
        elif token == ")":
            if not group:
                raise RuleError(f'rule "{rule}": an empty or unopened group in the term "{text}".')
            dims.append(tuple(group))
            group = None
        elif group is not None:
            if token in (ELLIPSIS, WHOLE, "1"):
                raise RuleError(f'rule "{rule}": "{token}" inside a group in the term "{text}"; name the factor.')
            group.append(token)
        else:
            dims.append((token,))
    if group is not None:
        raise RuleError(f'rule "{rule}": a group that is never closed in the term "{text}".')
    names = [name for dim in dims for name in dim if name not in (WHOLE, "1")]
    for name in names:
        if names.count(name) > 1:
            raise RuleError(f'rule "{rule}": factor "{name}" stands twice in the term "{text}".')
    return Term(tuple(dims), mark)


def _bind(rule: Rule, inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]) -> BoundRule:
    if (len(inputs), len(outputs)) != (len(rule.inputs), len(rule.outputs)):
        raise RuleError(
            f'rule "{rule}": found {len(inputs)} inputs and {len(outputs)} outputs, '
            f"needed {len(rule.inputs)} and {len(rule.outputs)}."
        )
    num_leading = _leading_dims(rule, (*inputs, *outputs))
    terms_in = tuple(_expand(term, num_leading) for term in rule.inputs)
    terms_out = tuple(_expand(term, num_leading) for term in rule.outputs)
    sizes: dict[str, int] = {}
    compounds: list[tuple[tuple[str, ...], int]] = []
    for term, shape in zip((*terms_in, *terms_out), (*inputs, *outputs), strict=True):
        if len(term.dims) != len(shape):
            raise RuleError(f'rule "{rule}": the term "{term}" has {len(term.dims)} dims, the tensor {list(shape)}.')
        for dim, size in zip(term.dims, shape, strict=True):
            name, *inner = dim
            if inner:
                compounds.append((dim, size))
            elif name == "1" and size != 1:
                raise RuleError(f'rule "{rule}": the term "{term}" has a 1 where the tensor has {size}.')
            elif name not in (WHOLE, "1") and sizes.setdefault(name, size) != size:
                raise RuleError(f'rule "{rule}": factor "{name}" is {sizes[name]} in one term and {size} in "{term}".')
    for dim, size in compounds:
        unknown = [name for name in dim if name not in sizes]
        known = math.prod(sizes[name] for name in dim if name in sizes)
        if len(unknown) == 1 and known and size % known == 0:
            sizes[unknown[0]] = size // known
        elif unknown or known != size:
            factors = ", ".join(f"{name}={sizes.get(name, '?')}" for name in dim)
            raise RuleError(f'rule "{rule}": the group "({" ".join(dim)})" ({factors}) does not make a dim of {size}.')
    sizes |= {name: math.prod(sizes[factor] for factor in members) for name, members in rule.products}
    return BoundRule(Rule(terms_in, terms_out, rule.products), sizes)


def _leading_dims(rule: Rule, shapes: tuple[tuple[int, ...], ...]) -> int:
    for term, shape in zip((*rule.inputs, *rule.outputs), shapes, strict=True):
        if (ELLIPSIS,) in term.dims:
            return max(len(shape) - len(term.dims) + 1, 0)
    return 0


def _expand(term: Term, num_leading: int) -> Term:
    dims: list[tuple[str, ...]] = []
    for dim in term.dims:
        dims.extend([(f"{ELLIPSIS}{i}",) for i in range(num_leading)] if dim == (ELLIPSIS,) else [dim])
    return Term(tuple(dims), term.mark)
