"""Sinks of attention: one more score of each query, by its head, to which no value belongs (GPT-OSS).

    softmax([scores, sink]) v  =  out · exp(lse - whole),    whole = log(exp(lse) + exp(sink))

where `out` and `lse` are those without the sink. Kernels take the weight of a score in the backward by the whole row's
result and log-sum-exp: given those with the sink, their gradients of queries, keys and values are right as they are.
The sink's own weight has no value, so that its gradient is minus that weight times (gradient · result). Legend as in
`kernels`; sinks have one element for each head, and dims of one behind it: [..., H, 1, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out_BHSD: Tensor, lse_BHS: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp with the sinks."""
    whole_BHS = torch.logaddexp(lse_BHS, sinks.squeeze(-1).to(lse_BHS.dtype))
    return out_BHSD * (lse_BHS - whole_BHS).exp().unsqueeze(-1), whole_BHS


def gradient_of_sinks(grad_BHSD: Tensor, out_BHSD: Tensor, whole_BHS: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, from the result and the log-sum-exp with them."""
    wide = whole_BHS.dtype
    level_BHS = (grad_BHSD.to(wide) * out_BHSD.to(wide)).sum(-1)
    of_each_BHS = -level_BHS * (sinks.squeeze(-1).to(wide) - whole_BHS).exp()
    return of_each_BHS.unsqueeze(-1).sum_to_size(sinks.shape).to(sinks.dtype)
