"""Training in several dtypes: parameters stored in one, used in another, their gradients summed in a third.

What is stored in float64 and computed in float32 is compared tightly with one process that casts by hand; what is
computed in bfloat16 and float16 is compared with what one process rounds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar import Precision
from autopar.errors import InputError, PeerError, PlanError
from autopar.ir.program.precision import NAMED
from tests.support import pipeline_training
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, Case, Training, build, compare, distance, parallel, train, train_alone
from tests.support.pipeline_training import PipelineCase, accumulated, stage_bytes_of
from tests.support.ranks import Ranks, mesh

DOUBLE = Precision(parameters=torch.float64, compute=torch.float32, reduce=torch.float64)


class CastByHand:
    """A model as one process runs it in a precision: every parameter and input is cast before the forward."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self.named_parameters, self.named_buffers = model.named_parameters, model.named_buffers
        self.parameters = model.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def cast(x: Tensor) -> Tensor:
            return x.to(self.precision.compute) if x.is_floating_point() else x

        weights = {name: cast(each) for name, each in self.model.named_parameters()}
        args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
        return torch.func.functional_call(self.model, weights, args, kwargs, tie_weights=True)


def alone(case: Case) -> Training:
    torch.manual_seed(0)
    return train(case, CastByHand(build(case), case.options["precision"]))  # type: ignore[arg-type]


def case_of(family: str, shape: tuple[int, ...], annotations: Any = (), **options: Any) -> Case:
    options = {"hardware": SLOW_DEVICES, "precision": DOUBLE, **options}
    return Case(family, shape, annotations, options, torch.float64, steps=3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    [
        case_of("llama", (2,), strategy="zero3"),
        case_of("llama", (2,), strategy="zero2"),
        case_of("llama", (2,), strategy="data_parallel"),
        pytest.param(case_of("llama", (2,), strategy="megatron"), marks=pytest.mark.slow),
        pytest.param(case_of("llama", (2, 2), strategy="hsdp"), marks=pytest.mark.slow),
        case_of("llama", (2, 2), strategy="fsdp_megatron"),
        pytest.param(case_of("llama", (2, 2)), marks=pytest.mark.slow),
        case_of("gpt2", (2,), strategy="zero3", recompute="full"),
    ],
    ids=str,
)
def test_parameters_stored_in_one_dtype_and_used_in_another_train_as_on_one_process(ranks: Ranks, case: Case) -> None:
    expected = alone(case)
    for found in ranks.run(parallel, case, world_size=torch.Size(case.mesh).numel(), timeout=180):
        compare(found, expected, 1e-4, 1e-5, 0.05)


def by_hand(case: PipelineCase) -> Training:
    model = CastByHand(pipeline_training.build(case), case.options["precision"])
    return pipeline_training.train(case, model, lambda step: accumulated(case, model, step))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        PipelineCase("llama", "dp2", options={"strategy": "zero3"}),
        pytest.param(PipelineCase("llama", "dp2", options={"strategy": "zero2"}), marks=pytest.mark.slow),
        pytest.param(PipelineCase("llama", "dp2xtp2", options={"strategy": "fsdp_megatron"}), marks=pytest.mark.slow),
        PipelineCase("llama", "dp2", options={"strategy": "data_parallel"}),
        PipelineCase("gpt2", "pp2", "1f1b"),
        PipelineCase("llama", "pp2xdp2", "interleaved_zero_bubble", options={"strategy": "zero3"}),
    ],
    ids=lambda case: f"{case}-{case.options.get('strategy')}",
)
def test_gradients_of_micro_batches_add_up_in_a_precision(ranks: Ranks, case: PipelineCase) -> None:
    case = replace(case, dtype=torch.float64, steps=3, options={"precision": DOUBLE, **case.options})
    expected = by_hand(case)
    for found in ranks.run(pipeline_training.parallel, case, world_size=case.world_size, timeout=180):
        compare(found, stage_bytes_of(found, expected), 1e-4, 1e-5, 0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
def test_bfloat16_with_float32_storage_rounds_as_one_process(ranks: Ranks, strategy: str) -> None:
    case = case_of("llama", (2,), strategy=strategy, precision="bf16-mixed")
    case = replace(case, dtype=torch.float32)
    precise = train_alone(*case.graph, case.steps, case.micro_steps)
    by_itself = distance(alone(replace(case, options={"precision": NAMED["bf16-mixed"]})), precise)
    for found in ranks.run(parallel, case, timeout=180):
        tensors = (*found.gradients.values(), *found.parameters.values())
        assert all(each is not None and each.dtype is torch.float32 for each in tensors)
        for kind, far in distance(found, precise).items():
            assert far <= 1.5 * by_itself[kind], f"{kind}: {far:.3g} from float32, one process {by_itself[kind]:.3g}"
        assert found.counted == {key: count for key, count in found.predicted.items() if count}


class _Two(nn.Module):
    """A linear layer on what a buffer shifts; it tells in which dtypes it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, str]]:
        hidden = self.layer(x)
        seen = {"weight": str(self.layer.weight.dtype), "x": str(x.dtype), "shift": str(self.shift.dtype)}
        return hidden, ids + 1, seen


def _dtypes(precision: Any) -> Any:
    x, ids = torch.randn(4, 8), torch.arange(4)
    model = autopar.compile(_Two(), mesh((2,), ("dp",)), (x, ids), precision=precision, strategy="zero3")
    hidden, numbers, seen = model(x, ids)
    hidden.sum().backward()
    weight = model.get_parameter("layer.weight")
    assert weight.grad is not None
    return weight.dtype, weight.grad.dtype, hidden.dtype, numbers.dtype, model.shift.dtype, seen


@pytest.mark.parametrize(
    ("precision", "stored", "used", "returned"),
    [
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.bfloat16),
        ("fp16-mixed", torch.float32, torch.float16, torch.float16),
        ("bf16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (Precision(compute=torch.bfloat16, outputs=torch.float32), torch.float32, torch.bfloat16, torch.float32),
        (Precision(torch.bfloat16, torch.float32), torch.bfloat16, torch.float32, torch.float32),
        (Precision(torch.float32, torch.float32, torch.bfloat16), torch.float32, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_each_dtype_is_where_it_was_requested(
    ranks: Ranks, precision: Any, stored: torch.dtype, used: torch.dtype, returned: torch.dtype
) -> None:
    for weight, gradient, hidden, numbers, shift, seen in ranks.run(_dtypes, precision):
        assert (weight, gradient, hidden) == (stored, stored, returned)
        assert numbers is torch.int64 and shift is torch.float32
        assert seen == {"weight": str(used), "x": str(used), "shift": "torch.float32"}


def test_a_dtype_that_is_no_float_is_refused() -> None:
    with pytest.raises(InputError, match=r"Precision\(compute=torch.int8\); give torch.float32, torch.bfloat16"):
        Precision(compute=torch.int8)


def test_a_precision_inside_of_autocast_is_refused() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match=r"inside of autocast\('cpu', torch.bfloat16\), .* leave one of them out"),
    ):
        autopar.plan(model, autopar.Mesh({"dp": 2}), (x,), precision="bf16-mixed")


class _Autocasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.float16):
            return self.layer(x), x.exp()


def _in_a_region() -> None:
    x = torch.randn(4, 8)
    expected = CastByHand(_Autocasting(), NAMED["bf16-mixed"])(x)
    found = autopar.compile(_Autocasting(), mesh((2,), ("dp",)), (x,), precision="bf16-mixed", outputs="full")(x)
    assert [each.dtype for each in found] == [each.dtype for each in expected] == [torch.float16, torch.bfloat16]
    torch.testing.assert_close(found, expected)


def test_a_region_of_autocast_in_the_forward_does_what_it_does_in_eager_mode(ranks: Ranks) -> None:
    ranks.run(_in_a_region)


def test_a_plan_with_a_precision_is_attached_with_it() -> None:
    model, inputs = nn.Linear(8, 8), (torch.randn(4, 8),)
    made = autopar.plan(model, autopar.Mesh({"dp": 2}), inputs, precision="bf16-mixed", strategy="zero3")
    loaded = autopar.Plan.from_json(made.to_json())
    assert loaded.attach(model, inputs, precision="bf16-mixed", strategy="zero3").explain("weight")
    with pytest.raises(PlanError, match=r"to_dtype is to bfloat16.* in the plan and absent here"):
        loaded.attach(model, inputs, strategy="zero3")


def _refused_apart() -> str:
    reduce = torch.float32 if dist.get_rank() else torch.bfloat16
    policy = Precision(torch.float32, torch.bfloat16, reduce)
    with pytest.raises(PeerError) as refused:
        autopar.compile(nn.Linear(8, 8), mesh((2,), ("dp",)), (torch.randn(4, 8),), precision=policy)
    return str(refused.value)


def test_ranks_with_other_precisions_are_refused(ranks: Ranks) -> None:
    assert all("give precision the same value on every rank" in text for text in ranks.run(_refused_apart))


def _zero3(**options: Any) -> dict[tuple[str, str], int]:
    """Return the bytes that a step of two 64 × 64 layers moves; the backward needs no weight of the first one."""
    model, on = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))), autopar.Mesh({"dp": 2})
    return dict(
        autopar.plan(
            model, on, (torch.randn(8, 64),), strategy="zero3", outputs="dtensor", **by_flag(**options)
        ).traffic
    )


@pytest.mark.parametrize(("precision", "reduced"), [("bf16-mixed", 4), (Precision(compute=torch.bfloat16), 2)])
def test_weights_are_gathered_as_they_are_used_and_gradients_reduced_as_requested(precision: Any, reduced: int) -> None:
    weight = 64 * 64
    assert _zero3(precision=precision) == {
        ("all_gather", "dp"): 3 * 2 * weight,
        ("reduce_scatter", "dp"): 2 * reduced * weight,
    }


def test_weights_that_autocast_casts_are_gathered_again_for_the_backward() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = _zero3()
    assert found == {("all_gather", "dp"): 3 * 2 * 64 * 64, ("reduce_scatter", "dp"): 2 * 2 * 64 * 64}


class _Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().square().mean()


def _added_up(strategy: str, precision: Any = "bf16-mixed") -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(16, 64)
    options: dict[str, Any] = {"strategy": strategy, "microbatches": 4, "precision": precision}
    model = autopar.compile(_Squared(), mesh((2,), ("dp",)), (x,), **by_flag(**options))
    model.train_step(x)
    return pipeline_training.whole(model.get_parameter("layer.weight").grad)  # type: ignore[return-value]


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "data_parallel", "fully_replicated"])
def test_sums_of_gradients_are_not_rounded(ranks: Ranks, strategy: str) -> None:
    found = ranks.run(_added_up, strategy)
    torch.manual_seed(1)
    x, model = torch.randn(16, 64), _Squared()
    # What one device computes at once is rounded once: half a micro-batch, or all of it.
    parts = x.chunk(4 if strategy == "fully_replicated" else 8)
    expected = torch.zeros(64, 64)
    for part in parts:
        expected += _gradient(model, part, x).float()
    assert (expected - expected.bfloat16().float()).norm() > 1e-3 * expected.norm()
    for gradient in found:
        assert (gradient - expected).norm() < 1e-6 * expected.norm()


def _gradient(model: _Squared, part: Tensor, x: Tensor) -> Tensor:
    """Return the gradient in bfloat16 that one device computes at once of a part of the batch."""
    weight = model.layer.weight.detach().bfloat16().requires_grad_()
    loss = (part.bfloat16() @ weight.T).float().square().sum() / (x.numel() / 4) / 4
    loss.backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "data_parallel", "fully_replicated"])
def test_micro_batches_add_up_gradients_as_they_are_reduced(ranks: Ranks, strategy: str) -> None:
    """As FSDP2 and Megatron's `grad_reduce_in_bf16`: whole gradients add up in `reduce`, reduced parts as stored."""
    found = ranks.run(_added_up, strategy, Precision(torch.float32, torch.bfloat16, torch.bfloat16))
    torch.manual_seed(1)
    x, model = torch.randn(16, 64), _Squared()
    if strategy == "fully_replicated":
        expected = _in_turn([_gradient(model, part, x) for part in x.chunk(4)])
    else:
        pairs = [[_gradient(model, half, x) for half in part.chunk(2)] for part in x.chunk(4)]
        if strategy == "zero2":  # each micro-batch reduces; one layer alone is not gathered again, and zero3 is zero1
            expected = _in_turn([(first + second).float() for first, second in pairs])
        else:
            expected = _in_turn([gradient for gradient, _ in pairs]) + _in_turn([gradient for _, gradient in pairs])
    for gradient in found:
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(gradient, expected.float(), rtol=0, atol=0)


def _in_turn(gradients: list[Tensor]) -> Tensor:
    """Return the sum, rounded after each gradient."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def _checkpointed(folder: str) -> None:
    ids = torch.randint(0, 200, (4, 8))
    model, other = (
        autopar.compile(_Table(seed), mesh((2,), ("dp",)), (ids,), precision="bf16-mixed", strategy="zero3")
        for seed in (0, 1)
    )
    state = model.state_dict()
    assert all(value.dtype is torch.float32 for value in state.values())
    save(state, checkpoint_id=folder)
    loaded = other.state_dict()
    load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded)
    torch.testing.assert_close(other(ids), model(ids), rtol=0, atol=0)


class _Table(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(200, 16)
        self.head = nn.Linear(16, 200, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).float().square().mean()


def test_checkpoints_hold_parameters_as_they_are_stored(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_checkpointed, str(tmp_path))


def _scaled(whole_first: bool) -> tuple[float, bool]:
    """Return the loss scale, and whether the step was skipped, after an overflow in one rank's sharded gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)]
    model, x = nn.Sequential(*([nn.LayerNorm(8)] if whole_first else []), *layers), torch.randn(4, 8)
    compiled = autopar.compile(model, mesh((2,), ("tp",)), (x,), strategy="megatron", precision="fp16-mixed")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    # The default is the world of the import: a group that an earlier call of this worker has left.
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, process_group=dist.group.WORLD)
    output = compiled(x)
    scaler.scale((output.full_tensor() if isinstance(output, DTensor) else output).float().square().mean()).backward()
    parameters: list[Any] = list(compiled.parameters())
    weight = next(p for p in parameters if any(each.is_shard() for each in p.placements))
    if dist.get_rank() == 1:
        weight.grad.to_local().view(-1)[0] = float("inf")
    before = weight.to_local().clone()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(before, weight.to_local())


@pytest.mark.parametrize("whole_first", [True, False])
def test_ranks_skip_a_step_together_when_one_of_them_overflows(ranks: Ranks, whole_first: bool) -> None:
    assert ranks.run(_scaled, whole_first) == [(2.0**9, True)] * 2


def _other_scaler() -> str:
    model = autopar.compile(_Table(0), mesh((2,), ("dp",)), (torch.zeros(4, 8, dtype=torch.int64),))
    model.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(InputError) as refused:
        model.train_step(torch.zeros(4, 8, dtype=torch.int64))
    return str(refused.value)


def test_a_scaler_with_which_ranks_decide_apart_is_refused(ranks: Ranks) -> None:
    assert all("GradScaler, which looks for overflow" in text for text in ranks.run(_other_scaler))
