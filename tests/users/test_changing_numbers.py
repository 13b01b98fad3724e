"""Numbers among the inputs that change from step to step, such as a temperature or the tokens of a batch."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.testing import assert_close

import autopar
from autopar.compiler.plan_cache import PlanCache
from autopar.errors import InputError
from tests.support.ending_ranks import ends_of
from tests.support.language_models import LanguageModel, texts
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

Numbers = Mapping[str, Any]
Loss = Callable[..., Tensor]

X_BD = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Blocks, and a loss that computes with numbers."""

    def __init__(self, loss: Loss, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(blocks)
        )
        self.loss = loss

    def forward(self, x_BD: Tensor, **numbers: Any) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x_BD = x_BD + block["down"](block["up"](x_BD).relu())
        return self.loss(x_BD, **numbers)


def _of_items(y_BD: Tensor, items: Any) -> Tensor:
    if torch.is_tensor(items):  # as transformers has it
        items = items.to(y_BD.device)
    return y_BD.square().sum() / items


def _tempered(y_BD: Tensor, temperature: float) -> Tensor:
    return -(y_BD / temperature).log_softmax(-1).diagonal().sum()


def _distilled(y_BD: Tensor, options: Mapping[str, Any], step: int) -> Tensor:
    weight, items = options["weight"], options["counts"][0]
    kept, drawn = y_BD.square().sum(), y_BD.abs().mean()
    return (1 - weight) * kept / items + weight * drawn + min(1.0, step / 4) * drawn


SERVED: Mapping[str, tuple[Loss, Sequence[Numbers]]] = {
    "an int divides": (_of_items, [{"items": items} for items in (32, 30, 31, 29, 28)]),
    "a float divides": (_tempered, [{"temperature": each} for each in (1.0, 0.7, 0.5, 0.4, 0.3)]),
    "three, two of them nested": (
        _distilled,
        [
            {"options": {"weight": weight, "counts": [items, True]}, "step": step}
            for weight, items, step in ((0.1, 7, 1), (0.3, 7, 2), (0.3, 9, 3), (0.7, 8, 4), (0.9, 5, 5))
        ],
    ),
}
"""Losses whose numbers can be tensors, and the numbers of five steps."""


def _branching(y_BD: Tensor, n: int) -> Tensor:
    return y_BD.square().mean() if n > 3 else y_BD.abs().mean()


def _sliced(y_BD: Tensor, n: int) -> Tensor:
    return sum((y_BD[:, :each].square().mean() for each in range(1, n)), y_BD.mean())


def _guarded(y_BD: Tensor, n: int) -> Tensor:
    if isinstance(n, int) and n > 3:
        return y_BD.square().mean() / n
    return y_BD.abs().mean() / n


def _only_of_tensors(y_BD: Tensor, n: Any) -> Tensor:
    if torch.is_tensor(n):
        n = n.clamp(max=4)
    return y_BD.square().mean() / n


def _untested_as_a_tensor(y_BD: Tensor, n: Any) -> Tensor:
    tested = n
    if torch.is_tensor(n):
        tested = 0
    return y_BD.square().mean() / n if tested < 4 else y_BD.abs().mean() / n


def _promoting(y_BD: Tensor, n: float) -> Tensor:
    return (torch.arange(8) * n * y_BD).square().mean()


REFUSED: Mapping[str, tuple[Loss, Sequence[Any], str]] = {
    "it branches": (_branching, (2, 3, 4, 5, 2), "forward tests its value at test_changing_numbers.py:"),
    "it is a size": (_sliced, (2, 3, 4, 5, 2), "forward needs its value at test_changing_numbers.py"),
    "its type counts": (
        _guarded,
        (2, 3, 4, 5, 2),
        "forward tests its value at test_changing_numbers.py:",
    ),
    "a tensor is clamped": (
        _only_of_tensors,
        (2, 3, 4, 5, 2),
        "forward computes something else of it if it is a tensor",
    ),
    "only a number is tested": (_untested_as_a_tensor, (1, 2, 3, 5, 1), "forward tests its value"),
    "it is promoted": (_promoting, (0.2, 0.3, 0.4, 0.5, 0.2), "mul does not take a tensor in its place"),
}
"""Losses for whose numbers a tensor cannot stand."""


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def _trained(model: Any, steps: Sequence[Numbers], x_BD: Tensor, step: str = "") -> list[Any]:
    """Losses and gradients of each step, and the parameters behind the last."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for numbers in steps:
        optimizer.zero_grad()
        if step:
            loss = getattr(model, step)(x_BD, **numbers)
        else:
            loss = model(x_BD, **numbers)
            loss.backward()
        found.append((loss.detach(), _gradients(model)))
        optimizer.step()
    return [*found, {name: whole(each) for name, each in model.named_parameters()}]


class _Counted:
    """Context that counts the plans made in it, and records the warnings about them."""

    def __enter__(self) -> _Counted:
        self._stack = mock.patch.object(PlanCache, "plan", autospec=True, side_effect=PlanCache.plan)
        self._plan = self._stack.__enter__()
        self._warnings = warnings.catch_warnings(record=True)
        self._found: Any = self._warnings.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *raised: Any) -> None:
        self.specified = [str(each.message) for each in self._found if "captured and planned" in str(each.message)]
        self.plans = self._plan.call_count
        self._warnings.__exit__(*raised)
        self._stack.__exit__(*raised)


LAYOUTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "auto": ({}, {}),
    "zero3": ({"strategy": "zero3"}, {}),
    "megatron": ({}, {"*.up": "column", "*.down": "row"}),
}


def _compiled(
    loss: Loss, numbers: Numbers, layout: str = "auto", dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    options, annotations = LAYOUTS[layout]
    model = Net(loss, more.pop("blocks", 1)).to(dtype)
    for pattern, role in annotations.items():
        autopar.annotate(model, pattern, dp=role)
    shape, names = more.pop("shape", (2,)), more.pop("names", ("dp",))
    inputs = {"x_BD": more.pop("x_BD", X_BD).to(dtype), **numbers}
    specified: dict[str, Any] = {"hardware": SLOW_DEVICES, **options, **more}
    return autopar.compile(model, mesh(shape, names), inputs, **by_flag(**specified))


def _served(name: str, layout: str, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Train on the numbers as one process does, and evaluate; return how many plans that took, and the warnings."""
    loss, steps = SERVED[name]
    x_BD, alone = X_BD.to(dtype), Net(loss).to(dtype)
    expected = _trained(alone, steps, x_BD)
    with _Counted() as counted:
        model = _compiled(loss, steps[0], layout, dtype)
        found = _trained(model, steps, x_BD)
        with torch.no_grad():
            model.eval()
            evaluated = [(model(x_BD, **numbers), alone(x_BD, **numbers)) for numbers in steps[1:]]
    tolerance: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13} if dtype == torch.float64 else {}
    assert_close(found, expected, **tolerance)
    for one, other in evaluated:
        assert_close(one, other, **tolerance)
    return counted.plans, counted.specified


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "layout", "dtype", "plans"),
    [
        ("an int divides", "auto", torch.float32, 3),
        ("an int divides", "zero3", torch.float64, 3),
        ("a float divides", "megatron", torch.float32, 3),
        ("a float divides", "auto", torch.float64, 3),
        ("three, two of them nested", "zero3", torch.float32, 4),
        ("three, two of them nested", "megatron", torch.float64, 4),
    ],
    ids=str,
)
def test_a_number_that_changes_is_planned_once_more(
    name: str, layout: str, dtype: torch.dtype, plans: int, ranks: Ranks
) -> None:
    (found, specified), _ = ranks.run(_served, name, layout, dtype)
    assert not specified
    assert found == plans, "two, one more as another number changes later, and one for evaluation"


def _refused(name: str) -> list[str]:
    loss, values, _ = REFUSED[name]
    steps = [{"n": value} for value in values]
    with _Counted() as counted:
        model = _compiled(loss, steps[0])
        found = _trained(model, steps, X_BD)
    assert_close(found, _trained(Net(loss), steps, X_BD))
    assert len(model._known) == len(set(values))
    return counted.specified


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REFUSED)
def test_a_number_that_no_tensor_can_stand_for_is_planned_for_each_value_and_named(name: str, ranks: Ranks) -> None:
    *_, why = REFUSED[name]
    for specified in ranks.run(_refused, name):
        assert len(specified) == 1 and re.search(f"as the number n changed .*: .*{why}", specified[0]), specified


def _in_bf16() -> None:
    """Compare with the plans of each value, which are those of numbers."""
    loss, steps = SERVED["a float divides"]
    options: dict[str, Any] = {"precision": "bf16-mixed", "strategy": "data_parallel"}
    with _Counted() as counted:
        found = _trained(_compiled(loss, steps[0], **options), steps[:3], X_BD)
    assert counted.plans <= 2 and not counted.specified
    with mock.patch("autopar.runtime.numbers.changing.ATTEMPTS", 0), _Counted() as counted:
        expected = _trained(_compiled(loss, steps[0], **options), steps[:3], X_BD)
    assert len(counted.specified) == 1
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_with_a_precision_a_tensor_has_all_digits_of_the_number(ranks: Ranks) -> None:
    ranks.run(_in_bf16)


def _in_parts(step: str, options: dict[str, Any]) -> list[str]:
    """Train on a mesh of one axis by micro-batches, with a mean as the loss."""
    loss, steps = SERVED["a float divides"]
    with _Counted() as counted:
        model = _compiled(loss, steps[0], **options)
        found = _trained(model, steps, X_BD, step)
    alone = Net(loss, options.get("blocks", 1))
    halves: list[Any] = []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for numbers in steps:
        optimizer.zero_grad()
        value = torch.stack([alone(x_BD, **numbers) for x_BD in X_BD.chunk(2)]).mean()
        value.backward()
        halves.append((value.detach(), _gradients(alone)))
        optimizer.step()
    for (one, mine), (other, theirs) in zip(found[:-1], halves, strict=True):
        assert_close(one, other)
        assert_close(mine, {name: theirs[name] for name in mine})
    return counted.specified


@pytest.mark.parametrize(
    "options",
    [{"microbatches": 2}, {"microbatches": 2, "names": ("pp",), "blocks": 3, "schedule": "1f1b"}],
    ids=["one stage", "a pipeline"],
)
def test_micro_batches_get_the_number_of_the_step(options: dict[str, Any], ranks: Ranks) -> None:
    assert ranks.run(_in_parts, "train_step", options) == [[], []]


def _of_two_kinds() -> None:
    """Numbers and calls that are no plans: the same value again, another type, zero, and a shape that is new."""
    loss, _ = SERVED["a float divides"]
    model, alone = _compiled(loss, {"temperature": 2.0}), Net(loss)

    def plans(values: Sequence[Any], x_BD: Tensor = X_BD) -> int:
        with _Counted() as counted:
            for value in values:
                assert_close(model(x_BD, temperature=value), alone(x_BD, temperature=value))
        assert not counted.specified
        return counted.plans

    first = torch.distributed.get_rank() == 0
    assert plans((2.0, 2.0)) == 0
    assert plans((0.5, 2.0, 0.25, 2.0)) == first
    assert plans((3,)) == first, "an int is a number of its own"
    assert plans((5, 7, 3)) == 0
    assert plans((2.0, 0.8), X_BD[:4]) == first, "a number that changes is a tensor from the start"


def test_a_plan_serves_all_values_of_one_type_and_shape(ranks: Ranks) -> None:
    ranks.run(_of_two_kinds)


def _copied() -> None:
    loss, steps = SERVED["an int divides"]
    model = _compiled(loss, steps[0], "zero3")
    found = [model(X_BD, **numbers) for numbers in steps[:3]]
    with _Counted() as counted:
        other = copy.deepcopy(model)
        assert_close([other(X_BD, **numbers) for numbers in steps[:3]], found)
    assert counted.plans == 0


def test_a_copy_knows_which_numbers_change(ranks: Ranks) -> None:
    ranks.run(_copied)


def _under_torch_compile() -> None:
    loss, steps = SERVED["a float divides"]
    model = _compiled(loss, steps[0])
    compilations = CompileCounter()
    model.compile(backend=compilations)
    assert_close(_trained(model, steps, X_BD), _trained(Net(loss), steps, X_BD))
    assert compilations.frame_count == 2, "one for the number, and one for the tensor"


@pytest.mark.slow
def test_torch_compile_compiles_once_more(ranks: Ranks) -> None:
    ranks.run(_under_torch_compile)


def _disagreeing() -> list[str]:
    """Return the errors for numbers that differ between ranks, at once and after steps in which they agreed."""
    loss, rank, found = SERVED["an int divides"][0], torch.distributed.get_rank(), []
    for inputs, steps in (("whole", 1), ("whole", 5), ("local", 1), ("local", 5)):
        model = _compiled(loss, {"items": 1}, inputs=inputs, check_inputs=False)
        for items in range(1, steps):
            model(X_BD, items=items).backward()
        with pytest.raises(InputError) as error:
            model(X_BD, items=10 + rank)
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_numbers_that_differ_between_ranks_are_named(ranks: Ranks) -> None:
    for messages in ranks.run(_disagreeing):
        for text in messages:
            assert text == (
                "the ranks were called differently: rank 0 with items: 10; rank 1 with items: 11. A number is one for "
                "the whole batch: give every rank the same, as by summing counts over the ranks (all_reduce)."
            )


def one_goes_on(rank: int) -> None:
    """Rank 1 has the number of the step before, which it expects."""
    model = _compiled(SERVED["an int divides"][0], {"items": 1}, check_inputs=False)
    for items in (1, 2, 3, 4, 4, 4):
        model(X_BD, items=items).backward()
    model(X_BD, items=4 if rank else 5).backward()


@pytest.mark.slow
def test_a_rank_that_goes_on_with_another_number_is_named(tmp_path: Path) -> None:
    for end in ends_of(one_goes_on, tmp_path, 2):
        assert "rank 0 with items: 5; rank 1 with items: 4. A number is one for the whole batch" in end.specified, end


class Counting(LanguageModel):
    """Divides the sum of its losses by a number of tokens."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_BSV = super().forward(input_ids, labels)["logits"]
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten(), reduction="sum") / num_items


def _bucketed() -> None:
    """Texts of several lengths, and their numbers of tokens."""
    inputs = [texts(4, length, length) | {"num_items": 4 * length} for length in (8, 6, 7, 5, 3)]
    torch.manual_seed(0)
    alone = Counting()
    with _Counted() as counted:
        options: dict[str, Any] = {"hardware": SLOW_DEVICES, "buckets": autopar.Buckets((8,))}
        model = autopar.compile(copy.deepcopy(alone), mesh((2,), ("dp",)), inputs[0], **by_flag(**options))
        assert_close([model(**each) for each in inputs], [alone(**each) for each in inputs])
    assert counted.plans <= 2 and not counted.specified


@pytest.mark.slow
def test_lengths_in_a_bucket_come_with_their_numbers(ranks: Ranks) -> None:
    ranks.run(_bucketed)


def _of_transformers() -> tuple[int, list[str]]:
    """The count of tokens of a causal language model, as a Trainer of one's own gives it."""
    import transformers

    sizes: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    torch.manual_seed(0)
    alone: Any = transformers.LlamaForCausalLM(config)
    ids_BS = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(0))
    rank = torch.distributed.get_rank()
    mine = {"input_ids": ids_BS.chunk(2)[rank], "labels": ids_BS.chunk(2)[rank]}
    options: Any = {"hardware": SLOW_DEVICES, "inputs": "local", "strategy": "zero3"}
    with _Counted() as counted:
        example = {**mine, "num_items_in_batch": 20}
        model = autopar.compile(copy.deepcopy(alone), mesh((2,), ("dp",)), example, **by_flag(**options))
        for items in (20, 18, 16, 17):
            found = model(**mine, num_items_in_batch=items)["loss"]
            expected = alone(input_ids=ids_BS, labels=ids_BS, num_items_in_batch=items)["loss"]
            assert_close(found, expected)
    return counted.plans, counted.specified


@pytest.mark.slow
def test_a_model_of_transformers_takes_a_count_of_tokens(ranks: Ranks) -> None:
    (plans, specified), _ = ranks.run(_of_transformers)
    assert plans == 2 and not specified
