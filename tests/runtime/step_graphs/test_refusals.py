"""Steps that cannot be CUDA graphs are refused by name, or run without; changes of what a graph fixes are noticed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.costs.hardware.load import load
from autopar.errors import InputError, PipelineError
from autopar.runtime.step_graphs.refusals import graph_is_required, reasons_of
from autopar.runtime.step_graphs.step import MOST_KINDS, WARM_UP
from tests.support.divided_experts import Form, batches, with_experts
from tests.support.recorded_calls import RecordedCalls
from tests.support.simulation.fake_mesh import fake_mesh

X = torch.arange(32.0).view(4, 8)


class Regression(nn.Module):
    """A model that returns its loss; `between` runs in the middle of its forward."""

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden if self.between is None else self.between(hidden)).square().mean()


@pytest.fixture
def devices() -> Iterator[DeviceMesh]:
    with fake_mesh({"dp": 2}) as found:
        yield found


def _graphed(devices: DeviceMesh, required: bool = True, **options: Any) -> Any:
    model = autopar.compile(Regression(), devices, (X,), strategy="data_parallel", hardware=load("h100"), **options)
    model.capture_steps(required, RecordedCalls())
    return model


@pytest.mark.parametrize("graph", [0, "always", None])
def test_values_of_the_option_are_named(graph: Any) -> None:
    with pytest.raises(InputError, match='give True, False, "auto" or "none"'):
        autopar.Run(cuda_graph=graph)


def test_a_cpu_has_no_graphs(devices: DeviceMesh) -> None:
    with pytest.raises(InputError, match=r"cuda_graph=True\) needs CUDA devices, and the mesh has the device type cpu"):
        autopar.compile(Regression(), devices, run=autopar.Run(cuda_graph=True))
    for graph in ("auto", "none", False):
        model = autopar.compile(Regression(), devices, (X,), run=autopar.Run(cuda_graph=graph))
        assert not model.graphs_steps
        with pytest.raises(InputError, match="compiled without CUDA graphs"):
            model.cuda_graph(model.train_step)


def test_a_cpu_has_no_graphs_of_pipelines() -> None:
    with fake_mesh({"pp": 2}) as pipeline:
        with pytest.raises(InputError, match="device type cpu"):
            autopar.compile(Regression(), pipeline, run=autopar.Run(cuda_graph=True))
        model = autopar.compile(Regression(), pipeline, run=autopar.Run(cuda_graph="auto"))
        assert not model.graphs_steps


@pytest.mark.parametrize(
    ("schedule", "training", "reason"),
    [
        ("pipedream", True, r'Pipeline\(schedule="pipedream"\), which exchanges versions of the weights'),
        ("pipedream_2bw", True, r'Pipeline\(schedule="pipedream_2bw"\), which exchanges versions of the weights'),
        ("1f1b", True, "needs NCCL, and the mesh communicates by fake, on the host"),
        (None, False, "training=False, which has no step"),
        (None, True, "needs NCCL, and the mesh communicates by fake, on the host"),
    ],
)
def test_meshes_of_cuda_devices_without_graphs(
    devices: DeviceMesh, schedule: str | None, training: bool, reason: str
) -> None:
    mesh: Any = SimpleNamespace(device_type="cuda", ndim=1, get_group=devices.get_group)
    with pytest.raises(InputError, match=reason):
        graph_is_required(True, mesh, training, schedule)
    assert graph_is_required("auto", mesh, training, schedule) is None


@pytest.mark.parametrize(
    ("between", "options", "reason"),
    [
        (nn.AlphaDropout(), {}, "draws random numbers by aten.alpha_dropout.default, which takes no generator"),
        (None, {"memory": autopar.Memory(offload="optimizer")}, "moves tensors to host memory and back"),
    ],
)
def test_the_per_rank_graph_says_what_needs_the_host(
    devices: DeviceMesh, between: Any, options: dict[str, Any], reason: str
) -> None:
    model = autopar.compile(Regression(between), devices, (X,), strategy="zero3", hardware=load("h100"), **options)
    reasons = list(reasons_of(model.prepare((X,), {})))
    assert len(reasons) == 1 and reason in reasons[0]
    model.capture_steps(True, RecordedCalls())
    with pytest.raises(InputError, match=rf"Run\(cuda_graph=True\): the step {reason}.*leave out"):
        model.train_step(X)


def test_draws_as_one_device_would_do_them_are_refused(devices: DeviceMesh) -> None:
    run = autopar.Run(deterministic=True)
    model = autopar.compile(Regression(nn.Dropout()), devices, (X,), strategy="zero3", run=run)
    model.capture_steps(True, RecordedCalls())
    with pytest.raises(InputError, match=r"as one device would, by a state of the host; leave out Run\(deterministic"):
        model.train_step(X)


@pytest.mark.parametrize(
    ("role", "precision", "reasons"),
    [
        ("expert", "bf16-mixed", ["sends rows to experts"]),
        ("replicated", "bf16-mixed", []),
        ("replicated", None, ['reads their counts on the host in float32; give precision="bf16-mixed"']),
        ("replicated", "fp16-mixed", ['reads their counts on the host in float16; give precision="bf16-mixed"']),
    ],
)
def test_experts_on_several_ranks_are_refused(
    devices: DeviceMesh, role: str, precision: str | None, reasons: list[str]
) -> None:
    model = autopar.annotate(with_experts(Form(num_experts=8), torch.float32), "*experts*", dp=role)
    batch = batches(1, torch.float32)[0]
    compiled: Any = autopar.compile(model, devices, batch, hardware=load("h100"), precision=precision)
    found = list(reasons_of(compiled.prepare((), batch)))
    assert len(found) == len(reasons) and all(b in a for a, b in zip(found, reasons, strict=True))


def _step_of(model: Any, scale: Any, optimizer: torch.optim.Optimizer | None = None) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        (loss * scale(loss)).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.zero_grad()
        return loss

    return model.cuda_graph(step)


def _run(step: Any, count: int = WARM_UP + 1) -> None:
    for number in range(count):
        step(X + number)


def test_a_number_that_a_step_reads_is_named_with_its_line(devices: DeviceMesh) -> None:
    with pytest.raises(InputError, match=r"_local_scalar_dense in .*, from .*test_refusals.py:\d+, for which"):
        _run(_step_of(_graphed(devices), lambda loss: loss.item()))


def test_a_number_that_changes_is_named(devices: DeviceMesh) -> None:
    counted = iter(range(1, 100))
    with pytest.raises(
        InputError, match=r"depends on the host: aten::mul.Tensor takes 3 in one step and 4 in the next"
    ):
        _run(_step_of(_graphed(devices), lambda loss: next(counted)))


def test_auto_warns_and_runs_without_a_graph(devices: DeviceMesh) -> None:
    step = _step_of(_graphed(devices, required=False), lambda loss: loss.item())
    with pytest.warns(UserWarning, match=r'Run\(cuda_graph="auto"\): the step runs without .* aten::_local_scalar'):
        _run(step)
    assert step.without


def test_optimizers_that_count_on_the_host_are_refused(devices: DeviceMesh) -> None:
    model = _graphed(devices)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        InputError, match=r"AdamW.step\(\), which counts on the host; make it AdamW\(…, capturable=True"
    ):
        _run(_step_of(model, lambda loss: 1, optimizer))
    with pytest.raises(InputError, match=r"LBFGS.step\(\), which counts on the host; step outside"):
        lbfgs = torch.optim.LBFGS(model.parameters())
        model.cuda_graph(lambda x: (model(x).backward(), lbfgs.step(lambda: 0.0)))(X)


def test_sgd_that_reads_its_learning_rate_from_the_device_is_refused(devices: DeviceMesh) -> None:
    model = _graphed(devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(InputError, match=r"reads its learning rate on the host; make it SGD\(…, fused"):
        _run(_step_of(model, lambda loss: 1, optimizer))
    _run(_step_of(model, lambda loss: 1, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), fused=True)))


def test_a_learning_rate_that_is_no_tensor_may_not_change(devices: DeviceMesh) -> None:
    model = _graphed(devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = _step_of(model, lambda loss: 1, optimizer)
    _run(step, WARM_UP + 2)
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(InputError, match=r"lr of SGD is 0.01 now and was 0.1 .* torch.tensor\(0.1"):
        step(X)


def test_steps_in_which_python_would_be_left_out_are_refused(devices: DeviceMesh) -> None:
    model = _graphed(devices)
    hook = model.down.weight.register_hook(lambda gradient: None)
    with pytest.raises(InputError, match=r"would leave out the hook on the parameter down.weight"):
        model.train_step(X)
    hook.remove()
    with torch.autograd.set_detect_anomaly(True), pytest.raises(InputError, match="autograd's anomaly mode"):
        model.train_step(X)
    with pytest.raises(InputError, match="an input that requires a gradient"):
        model.train_step(X.clone().requires_grad_())
    with pytest.raises(InputError, match="takes tensors and values that can be compared, found a set"):
        model.cuda_graph(lambda x: None)({1})


def test_torch_compile_makes_no_graphs_inside_of_graphs(devices: DeviceMesh) -> None:
    with pytest.raises(InputError, match=r'mode="reduce-overhead"\) makes CUDA graphs of parts of a step'):
        _graphed(devices).compile(mode="reduce-overhead")


def test_train_step_may_be_part_of_a_step_that_is_a_graph(devices: DeviceMesh) -> None:
    model = _graphed(devices)
    _run(model.cuda_graph(lambda x: (model.train_step(x), model.zero_grad())[0]), WARM_UP + 2)
    assert (model._recorder.captures, model._recorder.replays) == (1, 2), "it is a graph of its own"


def test_a_region_of_autocast_inside_the_step_is_in_the_graph(devices: DeviceMesh) -> None:
    model = _graphed(devices)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        model.zero_grad()
        return loss

    _run(model.cuda_graph(step), WARM_UP + 2)
    assert model._recorder.captures == 1


def test_a_step_that_sets_modes_is_refused(devices: DeviceMesh) -> None:
    model = _graphed(devices)
    with pytest.raises(InputError, match=r"sets a mode, freezes parameters .*; set them before the step, and keep"):
        _run(
            model.cuda_graph(lambda x: (model.eval()(x), model.train()(x).backward(), model.zero_grad())),
            MOST_KINDS + 1,
        )


def test_a_step_of_two_models_is_refused_if_both_learn(devices: DeviceMesh) -> None:
    """Gradients of the second would be written where its parameters do not look."""
    one, other = _graphed(devices), _graphed(devices)

    def step(learns: bool, trains: bool, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(learns):
            second = other.train_step(x) if trains else other(x)
        loss = one(x) + second
        loss.backward()
        one.zero_grad()
        return loss

    for trains in (False, True):
        with pytest.raises(InputError, match=r"calls another compiled model, whose gradients .* torch.no_grad"):
            _run(one.cuda_graph(functools.partial(step, True, trains)))
    _run(one.cuda_graph(functools.partial(step, False, False)), WARM_UP + 2)
    assert one._recorder.captures == 1


def test_another_mode_is_another_kind_and_frozen_parameters_are_noticed(devices: DeviceMesh) -> None:
    model = _graphed(devices)
    step = _step_of(model, lambda loss: 1)
    _run(step, WARM_UP + 2)
    recorder = model._recorder
    assert (recorder.captures, recorder.replays) == (1, 2)
    model.up.weight.requires_grad_(False)
    _run(step)
    assert recorder.captures == 2, "the graph of parameters that learn was replayed for frozen ones"


def test_shapes_are_kinds_that_share_gradients_and_too_many_are_refused(devices: DeviceMesh) -> None:
    model, places = _graphed(devices), set()
    for size in (4, 6):
        for _ in range(WARM_UP + 1):
            model.zero_grad()
            model.train_step(X.repeat(2, 1)[:size])
        places.add(model.up.weight.grad.data_ptr())
    assert len(places) == 1 and model._recorder.captures == 2
    with pytest.raises(InputError, match=f"is of another kind than the {MOST_KINDS} before it"):
        for size in range(8, 8 + 2 * MOST_KINDS, 2):
            model.train_step(X.repeat(8, 1)[:size])


def test_the_plan_counts_the_copies_of_a_batch(devices: DeviceMesh) -> None:
    model = autopar.compile(Regression(), devices, hardware=load("h100"), memory="80GB", microbatches=2)
    model.capture_steps(True, RecordedCalls())
    model.prepare((X,), {})
    assert model.plan.reserved.graph_bytes == X.nbytes
    assert "inputs of the CUDA graph 128 B" in str(model.plan)
    assert type(model.plan).from_json(model.plan.to_json()).reserved == model.plan.reserved


GRAPH = autopar.Run(cuda_graph=True)
DRAWING_ONCE = autopar.Run(cuda_graph=True, deterministic=True)
ON_H100 = autopar.Mesh({"dp": 2}, hardware="h100")
STAGES = autopar.Mesh({"pp": 2}, hardware="h100")
PIPEDREAM = {"pipeline": autopar.Pipeline(schedule="pipedream")}


def test_a_plan_without_devices_has_experts_in_a_graph_if_their_rows_are_padded() -> None:
    model = autopar.annotate(with_experts(Form(num_experts=8), torch.float32), "*experts*", dp="expert")
    batch = batches(1, torch.float32)[0]
    options: dict[str, Any] = {"run": GRAPH, "precision": "bf16-mixed"}
    with pytest.raises(InputError, match=r"sends rows to experts, .* plan with Experts\(padded=…\)"):
        autopar.plan(model, ON_H100, batch, **options)
    plan = autopar.plan(model, ON_H100, batch, experts=autopar.Experts(padded=2.0), **options)
    assert plan.reserved.graph_bytes > 0


@pytest.mark.parametrize("graph", [True, "auto"])
def test_a_plan_without_devices_counts_the_copies_of_a_batch_as_compile_does(devices: DeviceMesh, graph: Any) -> None:
    options: dict[str, Any] = {"memory": "80GB", "microbatches": 2}
    model = autopar.compile(Regression(), devices, hardware=load("h100"), **options)
    model.capture_steps(True, RecordedCalls())
    model.prepare((X,), {})
    run = autopar.Run(cuda_graph=graph)
    for mesh, given in ((ON_H100, {}), ("auto", {"devices": 2, "hardware": "h100"})):
        plan: Any = autopar.plan  # its overloads know a mesh or "auto", not either
        found = plan(Regression(), mesh, (X,), run=run, **options, **given)
        assert found.reserved == model.plan.reserved and found.reserved.graph_bytes == X.nbytes


def test_a_plan_of_a_pipeline_counts_the_copies_of_a_batch_as_compile_does() -> None:
    options: dict[str, Any] = {"memory": "80GB", "microbatches": 2}
    with fake_mesh({"pp": 2}) as pipeline:
        model: Any = autopar.compile(Regression(), pipeline, hardware=load("h100"), **options)
        model.capture_steps(True, RecordedCalls())
        model.prepare((X,), {})
    found = autopar.plan(Regression(), STAGES, (X,), run=GRAPH, **options)
    assert found.reserved == model.plan.reserved and found.reserved.graph_bytes == X.nbytes
    assert found.reserved_bytes == model.plan.reserved_bytes
    assert "inputs of the CUDA graph 128 B" in str(found)


@pytest.mark.parametrize(
    ("model", "mesh", "options", "reason"),
    [
        (Regression(), ON_H100, {"training": False}, "training=False, which has no step"),
        (Regression(), autopar.Mesh({"dp": 2}, hardware="cpu"), {}, "needs CUDA devices, and the hardware profile"),
        (Regression(), STAGES, {**PIPEDREAM, "microbatches": 2}, 'schedule="pipedream".*, which exchanges versions'),
        (Regression(nn.AlphaDropout()), STAGES, {"microbatches": 2}, "aten.alpha_dropout.*in stage [01]"),
        (Regression(nn.AlphaDropout()), ON_H100, {}, "the step draws random numbers by aten.alpha_dropout"),
        (Regression(nn.Dropout()), ON_H100, {"run": DRAWING_ONCE}, "the step draws random numbers as one device"),
        (Regression(), ON_H100, {"memory": autopar.Memory(offload="optimizer")}, "the step moves tensors to host"),
    ],
)
def test_a_plan_without_devices_refuses_what_cannot_be_a_graph(
    model: Any, mesh: Any, options: dict[str, Any], reason: str
) -> None:
    plan: Any = autopar.plan  # its overloads know no options by name
    with pytest.raises(InputError, match=rf"Run\(cuda_graph=True\).*{reason}.*leave out"):
        plan(model, mesh, (X,), **{"run": GRAPH, **options})
    assert plan(model, mesh, (X,), **{**options, "run": autopar.Run(cuda_graph="auto")}).mesh == mesh


@pytest.mark.parametrize("found", [{}, {"mesh": "auto", "devices": 2, "pipeline": "pp", "hardware": "h100"}])
def test_a_plan_without_devices_refuses_a_pipeline_that_draws_as_one_device(found: dict[str, Any]) -> None:
    options: dict[str, Any] = {"mesh": STAGES, "microbatches": 2, **found}
    with pytest.raises(PipelineError, match=r"Run\(deterministic=True\) draws dropout masks .* leave it out"):
        autopar.plan(Regression(nn.Dropout()), example_inputs=(X,), run=autopar.Run(deterministic=True), **options)
