"""Token exchange of Hugging Face's expert parallelism, translated to autopar annotations.

A plan marks a module of experts with "ep_dispatch_experts"; `config.distributed_config.ep_implementation` says how:

    "all_to_all"   rows of tokens travel to the ranks of their experts: tokens and experts are split together
    "all_reduce"   each rank runs its experts on all tokens, and outputs are summed: experts alone
    "auto"         one of these: the planner decides
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from autopar.errors import AnnotationError
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from autopar.ir.sharding.annotation import FACTOR, Specified

DISPATCHED = "ep_dispatch_experts"
FACTORS: Mapping[str, str | None] = {"auto": None, "all_to_all": "+x", "all_reduce": "x"}
"""Implementation → the factors of both ends that it splits, by the rules of strategies/rules/expert_rules.py."""


def exchange_of(model: nn.Module, pattern: str) -> Iterator[tuple[str, Specified]]:
    """Yield the annotations of a module of experts: one for each of dispatch and combine, or "expert" for "auto".

    Raises AnnotationError for an implementation that autopar has no layout for.
    """
    found = _implementation_of(model)
    if not isinstance(found, str) or found not in FACTORS:
        raise AnnotationError(
            f'annotate_plan: "{pattern}" is dispatched by ep_implementation={found!r}; known are '
            f"{', '.join(FACTORS)}. Set config.distributed_config.ep_implementation to one of these, or annotate the "
            f'experts yourself, as in annotate(model, "{pattern}", ep="expert").'
        )
    factor = FACTORS[found]
    if factor is None:
        yield pattern, "expert"
    else:
        for end in (DISPATCH, COMBINE):
            yield f"{pattern}.{end._schema.name.partition('::')[2]}", f"{FACTOR}{factor}"


def _implementation_of(model: nn.Module) -> object:
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if isinstance(config, Mapping):
        return config.get("ep_implementation", "auto")
    return getattr(config, "ep_implementation", "auto")
