"""Cases that fuzzing campaigns have found, as programs: name → (case, expected outcome)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.case import Case
from tests.fuzz.program import Program

PENALTY = Program(
    (("v0 = F.linear(x0, w0)", "v1 = (v0*w1).sum()", "loss = v0.square().mean() + w0.square().sum() + v1 + w1.sum()"),),
    {"x0": (4, 8)},
    {"w0": (8, 8), "w1": (8,)},
)
"""Weights with two uses in different layouts: their gradients move over joined axes, out of a shared reshard."""

FOUND: Mapping[str, tuple[Case, str]] = {
    "a penalty on weights, data parallel over two axes": (
        Case(PENALTY, (2, 2), options={"strategy": "data_parallel"}),
        "equal",
    ),
    "a penalty on weights, stored in parts over two axes": (
        Case(PENALTY, (2, 2), options={"strategy": "zero3"}),
        "equal",
    ),
    "every weight stored whole is stepped once": (
        Case(
            Program((("loss = x0.cos().sum() + w0.abs().mean()",),), {"x0": (4,)}, {"w0": (8, 4)}),
            (2,),
            options={"strategy": "data_parallel", "outputs": "full"},
        ),
        "equal",
    ),
    "what is computed again begins inside of a tensor": (
        Case(
            Program(
                (("v0 = F.embedding(i0, w0)[:, 1:]", "v1 = torch.where(v0>w1, v0, w1*0.5)", "loss = v1.sin().sum()"),),
                {"i0": (4, 4)},
                {"w0": (8, 4), "w1": (4,)},
            ),
            (2,),
            options={"recompute": "selective"},
        ),
        "equal",
    ),
    "one mesh after another of the same shape": (
        Case(
            Program((("loss = F.linear(x0, w0, w1).mean()",),), {"x0": (4, 4)}, {"w0": (5, 4), "w1": (5,)}),
            (2, 1, 2),
            annotations=(("*", {"storage": ("dp", "depth")}),),
        ),
        "equal",
    ),
}
