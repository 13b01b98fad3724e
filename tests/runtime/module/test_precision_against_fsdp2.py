"""Training in mixed precision, compared with torch's FSDP2 with the same policy and with float32, on gloo ranks."""

from __future__ import annotations

import pytest

from benchmarks.precision import Options, distance, furthest, in_float32, measured
from tests.support.ranks import Ranks

AS_FAR = 1.02  # what both round alike, they round in another order


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16-mixed", pytest.param("fp16-mixed", marks=pytest.mark.slow)])
def test_a_policy_rounds_no_more_than_fsdp2_does(ranks: Ranks, policy: str) -> None:
    options = Options((policy,), steps=4, hidden=32, num_ranks=2)
    precise = in_float32(options)
    for found in ranks.run(measured, options):
        ours, theirs = found[policy]
        assert furthest(ours, theirs) <= furthest(theirs, precise)
        assert 0 < distance(ours, precise) <= AS_FAR * distance(theirs, precise)
        assert ours.peak <= theirs.peak
