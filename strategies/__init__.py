"""Strategies that may be chosen: a table of rules per family of operations, users' own rules, and the lookup."""

if __name__ != "autopar.strategies":  # a second copy of the tables, under another name, would go unnoticed
    raise ImportError(f"imported as {__name__!r}; write `import autopar.strategies` instead.")

from dataclasses import replace

from autopar.ir.program.effects import draws
from autopar.ir.sharding.operation import Call, OpRule
from autopar.strategies.notation import Entry
from autopar.strategies.registered import registered
from autopar.strategies.rules import expert_rules as experts
from autopar.strategies.rules import (
    factory,
    fourier,
    indexing,
    kernels,
    linalg,
    matmul,
    pointwise,
    random,
    reduction,
    view,
)
from autopar.strategies.rules.layers import (
    attention,
    cached_attention,
    conv,
    embedding,
    masked_attention,
    norm,
    recurrent,
    tiled_loss,
    tiled_mlp,
)
from autopar.strategies.rules.layers import loss_rules as loss

TABLES = (
    attention,
    cached_attention,
    conv,
    embedding,
    experts,
    factory,
    fourier,
    indexing,
    kernels,
    linalg,
    loss,
    masked_attention,
    matmul,
    norm,
    pointwise,
    random,
    recurrent,
    reduction,
    tiled_loss,
    tiled_mlp,
    view,
)
RULES: dict[object, Entry] = {target: entry for table in TABLES for target, entry in table.RULES.items()}
BY_NAME: dict[str, Entry] = {**attention.BY_NAME, **kernels.BY_NAME, **matmul.BY_NAME, **pointwise.BY_NAME}
"""Operations that are not there until another module is imported."""


def rule_of(call: Call) -> OpRule | None:
    """Return the rule of a call; None where there is none, so that the call runs replicated.

    Rules that the user registered take precedence over the tables; RuleError where that does not fit the call. Random
    numbers of such a call are seeded by part. A rule of the tables of a call that draws counts where it says how it
    draws.
    """
    given = registered(call.target)
    if given is not None:
        op = given.of(call)
        return replace(op, implementations=(random.SEEDED,)) if draws(call.target, call.arguments) else op
    entry = RULES.get(call.target) or BY_NAME.get(str(call.target))
    answer = entry(call) if callable(entry) else entry
    op = OpRule(answer) if isinstance(answer, str) else answer
    if op is not None and draws(call.target, call.arguments):
        return op if any(each.random for each in op.implementations) else None
    return op
