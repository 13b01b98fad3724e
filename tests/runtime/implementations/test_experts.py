"""The operators of experts on simulated ranks, however experts are written and whatever tokens choose."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from autopar.runtime.collectives.mesh_axes import record_traffic
from tests.support.capped_experts import capped
from tests.support.divided_experts import Form, batches, choices, forced, with_experts
from tests.support.simulation.training import Steps, Training, fault_of, train_alone, train_on_ranks

STEPS = Steps(batches(3))
FORMS = {
    "one of all": Form(top_k=1),
    "all of all": Form(top_k=4),
    "two ranks' experts alone": Form(num_experts=8, favoured=(0, 1)),
    "one expert for all": Form(top_k=1, favoured=(3,)),
    "biases": Form(bias=True),
    "biases, summed": Form(bias=True, end="sum"),
    "router frozen": Form(frozen=("router",)),
    "experts frozen": Form(frozen=("w1", "w2")),
    "all but experts frozen": Form(frozen=("router", "linear", "head")),
    "weighted before": Form(early=True),
    "weighted before, scattered": Form(early=True, bias=True, end="scatter_add"),
    "summed": Form(end="sum"),
    "scattered": Form(end="scatter_add"),
}
CHOICES = (("t",), ("x",), ("t+x",), ("x", "t+x"))
QUICK = {
    "one of all": ("t+x",),
    "all of all": ("x",),
    "two ranks' experts alone": ("t+x", "t+x"),
    "one expert for all": ("x", "t+x"),
    "biases, summed": ("x",),
    "router frozen": ("x",),
    "experts frozen": ("t+x",),
    "weighted before, scattered": ("t+x",),
}


@functools.lru_cache
def alone(form: Form) -> Training:
    return train_alone(with_experts(form), STEPS)


def hold(form: Form, names: tuple[str, ...], **options: Any) -> None:
    """Check that training on two ranks for each of the choices is as on one process."""
    mesh = dict(zip("ab"[: len(names)], (2,) * len(names), strict=True))
    found = train_on_ranks(with_experts(form), STEPS, mesh, options, forced(choices(*names)))
    fault = fault_of(found, alone(form))
    assert not fault, fault


@pytest.mark.sample(1)
@pytest.mark.parametrize(("form", "names"), QUICK.items(), ids=QUICK)
def test_ranks_train_as_one_process(form: str, names: tuple[str, ...]) -> None:
    hold(FORMS[form], names)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "names"), itertools.product(FORMS, CHOICES))
def test_ranks_train_as_one_process_in_every_form_and_choice(form: str, names: tuple[str, ...]) -> None:
    hold(FORMS[form], names)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("form", "names"), QUICK.items(), ids=QUICK)
def test_ranks_whose_rows_are_padded_train_as_one_process(form: str, names: tuple[str, ...]) -> None:
    hold(FORMS[form], names, padded_rows=2.0 ** len(names), recompute="full" if FORMS[form].bias else "none")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "names"), itertools.product(FORMS, (*CHOICES, ("t+x", "o"))))
def test_ranks_whose_rows_are_padded_train_in_every_form_and_choice(form: str, names: tuple[str, ...]) -> None:
    hold(FORMS[form], names, padded_rows=4.0)


@pytest.mark.parametrize("names", [("x",), ("t+x",)])
def test_more_rows_than_there_is_room_for_are_an_error(names: tuple[str, ...]) -> None:
    form = Form(top_k=1, favoured=(3,))
    with pytest.raises(RuntimeError, match=r"more than (5|10) rows go .* Experts\(padded=…\) gives room for"):
        hold(form, names, padded_rows=1.25)
    hold(Form(top_k=4), names, padded_rows=1.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["full", "full_save_collectives", "selective"])
def test_what_is_computed_again_is_bit_identical_and_full_alone_exchanges_tokens_again(mode: str) -> None:
    found, moved = {}, {}
    for each in ("none", mode):
        with record_traffic() as record:
            found[each] = train_on_ranks(
                with_experts(Form(bias=True)), STEPS, {"ep": 2}, {"recompute": each}, forced(choices("t+x"))
            )
        moved[each] = dict(record.num_bytes)
        plan = found[each].plan
        assert plan is not None and dict(plan.recompute) == ({} if each == "none" else {"layers.0": mode})
    more = {key: num_bytes - moved["none"][key] for key, num_bytes in moved[mode].items()}
    assert {collective for (collective, _), each in more.items() if each} == (
        {"all_to_all"} if mode == "full" else set()
    )
    for kind in ("gradients", "parameters"):
        again, kept = getattr(found[mode], kind), getattr(found["none"], kind)
        for name, values in kept.items():
            assert all(torch.equal(a, b) for a, b in zip(again[name], values, strict=True)), name


# 4 positions of K slots each, over 4 experts: of K = 2 a balanced expert has 2 rows of a sample.
CAPPED = {
    "tokens": (Form(), ("t",), 0.5, 1),
    "both, weighted before": (Form(early=True), ("t+x",), 0.75, 2),
    "positions": (Form(), ("p+x",), 0.5, 1),
}
FURTHER_CAPPED = {
    "experts": (Form(bias=True), ("x",), 0.75, 2),
    "both, beside experts": (Form(top_k=1, favoured=(3,)), ("x", "t+x"), 1.0, 1),
    "positions alone": (Form(), ("p",), 0.5, 1),
    "features": (Form(end="sum"), ("o",), 0.5, 1),
    "features of tokens": (Form(), ("d",), 0.5, 1),
    "all experts": (Form(top_k=4), ("x", "t"), 0.5, 2),
    "one exchange": (Form(end="scatter_add"), ("t+x", "t+x"), 0.75, 2),
    "positions and samples": (Form(early=True, end="sum"), ("p+x", "t+x"), 0.75, 2),
    "two ranks' experts alone": (Form(num_experts=8, favoured=(0, 1)), ("t+x", "x"), 1, 1),
    "nothing is dropped": (Form(), ("x", "t+x"), 2.0, 4),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("form", "names", "capacity_factor", "limit"),
    [
        *(pytest.param(*each, id=name) for name, each in CAPPED.items()),
        *(pytest.param(*each, id=name, marks=pytest.mark.slow) for name, each in FURTHER_CAPPED.items()),
    ],
)
def test_ranks_drop_what_one_process_drops(
    form: Form, names: tuple[str, ...], capacity_factor: float, limit: int
) -> None:
    steps, mesh = Steps(batches(5, length=4)), dict(zip("ab"[: len(names)], (2,) * len(names), strict=True))
    options = {"capacity_factor": capacity_factor, "recompute": "full" if form.early else "none"}
    found = train_on_ranks(with_experts(form), steps, mesh, options, forced(choices(*names)))
    fault = fault_of(found, train_alone(capped(with_experts(form), limit), steps))
    assert not fault, fault


@pytest.mark.parametrize(("inner", "outer"), [(8, 16), (6, 5), (8, 3), (3, 8)])
def test_a_grouped_product_reads_no_counts_on_the_host(inner: int, outer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are no multiple of 16 bytes are padded."""
    counts = torch.tensor([2, 0, 3])
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        rows = torch.randn(5, inner, dtype=dtype, requires_grad=True)
        stored = torch.randn(3, outer, inner, dtype=dtype, requires_grad=True)
        matrices = torch.stack([stored[number].t() for number in (0, 0, 2, 2, 2)])
        expected = (rows[:, None] @ matrices)[:, 0]
        gradient = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (rows, stored), gradient)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "tolist", None)
            found = torch.ops.autopar.grouped_mm(rows, stored.transpose(1, 2), counts)
            gradients = torch.autograd.grad(found, (rows, stored), gradient)
        assert found.is_contiguous()
        torch.testing.assert_close((found, *gradients), (expected, *wanted), rtol=rtol, atol=rtol)
