"""What may be chosen: one table of rules per family of operations, and the lookup over all of them."""

if __name__ != "autopar.strategies":  # a second copy of the tables, under another name, would go unnoticed
    raise ImportError(f"imported as {__name__!r}; write `import autopar.strategies` instead.")

from autopar.sharding.operation import Call, OpRule
from autopar.strategies.notation import Entry
from autopar.strategies.rules import (
    factory,
    fourier,
    indexing,
    linalg,
    matmul,
    pointwise,
    random,
    reduction,
    view,
)
from autopar.strategies.rules.layers import attention, conv, embedding, loss, norm, recurrent

TABLES = (
    attention,
    conv,
    embedding,
    factory,
    fourier,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    random,
    recurrent,
    reduction,
    view,
)
RULES: dict[object, Entry] = {target: entry for table in TABLES for target, entry in table.RULES.items()}
BY_NAME: dict[str, Entry] = matmul.BY_NAME
"""Operations that are not there until another module is imported."""


def rule_of(call: Call) -> OpRule | None:
    """The rule of a call; None where the tables have none, so that the call runs replicated."""
    entry = RULES.get(call.target) or BY_NAME.get(str(call.target))
    answer = entry(call) if callable(entry) else entry
    return OpRule(answer) if isinstance(answer, str) else answer
