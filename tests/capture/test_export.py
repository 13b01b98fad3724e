"""Capture: a program computes what the model computes, and what tracing would change in silence is guarded."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture import tracing
from autopar.capture.export import capture, skeleton
from autopar.capture.guards import unseen
from autopar.errors import CaptureError
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY
from autopar.ir.program.program import Program, TensorInfo
from tests.support.eager import assert_as_eager, calls, run
from tests.support.families import FAMILIES

aten = torch.ops.aten


def _forward(function: Any, **tensors: Any) -> nn.Module:
    """A module with these parameters and buffers whose forward is `function(module, *inputs)`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in tensors.items():
                if isinstance(value, nn.Parameter | nn.Module):
                    setattr(self, name, value)
                else:
                    self.register_buffer(name, value)

        def forward(self, *inputs: Any) -> Any:
            return function(self, *inputs)

    return Model()


@functools.cache
def _captured(name: str) -> Program:
    family = FAMILIES[name]
    return capture(family.build(), *family.inputs(0))


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(1)))


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_eager(name: str) -> None:
    family = FAMILIES[name]
    assert_as_eager(family.build(), *family.inputs(0), family.loss)


@pytest.mark.parametrize("name", ["llama", "resnet", "transformer_encoder"])
def test_a_family_evaluates_as_eager(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    args, kwargs = family.inputs(1)
    program = capture(model, args, kwargs, training=False)
    assert model.training and not program.training
    model.eval()
    with torch.no_grad():
        flat = pytree.tree_leaves((args, kwargs))
        found = run(program, dict(model.named_parameters()), dict(model.named_buffers()), flat)
        torch.testing.assert_close(family.loss(found), family.loss(model(*args, **kwargs)), rtol=1e-6, atol=1e-6)


def test_families_are_equal_on_every_build_and_batches_differ() -> None:
    family = FAMILIES["mlp"]
    first, second = family.build(), family.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(family.inputs(0)[0][0], family.inputs(1)[0][0])


def test_importing_the_families_does_not_import_transformers() -> None:
    code = "import sys, tests.support.families; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The silent errors: each of these models would be recorded as another computation.


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_causal_attention_is_recorded_without_a_mask(name: str) -> None:
    program = _captured(name)
    for node in calls(program, aten.scaled_dot_product_attention.default):
        assert node.args[3:6] == (None, 0.0, True)
        assert name == "gpt2" or node.kwargs["enable_gqa"] is True


def test_a_sliding_window_keeps_its_mask() -> None:
    program = _captured("mistral")
    assert all(node.args[3] is not None for node in calls(program, aten.scaled_dot_product_attention.default))


def test_packed_position_ids_from_the_caller_are_seen() -> None:
    family = FAMILIES["llama"]
    args, kwargs = family.inputs(0)
    packed = torch.cat([torch.arange(6), torch.arange(10)]).expand(4, 16).contiguous()
    program = assert_as_eager(family.build(), args, {**kwargs, "position_ids": packed}, family.loss)
    assert all(node.args[3] is not None for node in calls(program, aten.scaled_dot_product_attention.default))


def test_an_attention_mask_from_the_caller_is_seen() -> None:
    family = FAMILIES["llama"]
    args, kwargs = family.inputs(0)
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[0, :5] = 0
    assert_as_eager(family.build(), args, {**kwargs, "attention_mask": mask}, family.loss)


@torch.library.custom_op("autopar_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    """The identity, whose gradient is three times too large, so that a lost backward shows."""
    return x.clone()


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tripled.register_autograd(lambda ctx, gradient: 3 * gradient)


def test_a_custom_operator_stays_whole_with_its_backward() -> None:
    model = _forward(lambda self, x: tripled(x * self.w), w=_weight(3))
    program = assert_as_eager(model, (_x(2, 3),))
    assert len(calls(program, torch.ops.autopar_tests.tripled.default)) == 1


def test_a_module_may_hold_a_custom_operator() -> None:
    model: Any = _forward(lambda self, x: self.operator(x * self.w), w=_weight(3))
    model.operator = tripled
    assert len(calls(capture(model, (_x(2, 3),), {}), torch.ops.autopar_tests.tripled.default)) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_is_called_directly(reentrant: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = x * self.v
        return torch.utils.checkpoint.checkpoint(lambda h: (h @ self.w).sin(), hidden, use_reentrant=reentrant)

    program = assert_as_eager(_forward(forward, w=_weight(3, 3), v=_weight(3)), (_x(2, 3),))
    assert [node.target for node in calls(program)] == [
        aten.mul.Tensor,
        aten.matmul.default,
        aten.sin.default,
    ]


def test_what_runs_without_gradients_passes_none_back() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * self.w
        with torch.no_grad():
            scale = (y * self.w).exp()
            with torch.enable_grad():
                inner = y * self.v
        return y * scale + inner

    program = assert_as_eager(_forward(forward, w=_weight(3), v=_weight(3)), (_x(2, 3),))
    (exp,) = calls(program, aten.exp.default)
    assert not exp.meta["tensor"].requires_grad


UNCHANGED = {
    "to": lambda h: h.to(torch.float32),
    "float": lambda h: h.float(),
    "contiguous": lambda h: h.contiguous(),
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "flatten": lambda h: h.flatten(1),
    "type_as": lambda h: h.type_as(h),
    "positive": lambda h: +h,
}
"""Calls that give back the tensor that they are given; a view or a cast would give another one."""


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_tensor_that_a_call_without_gradients_gives_back_keeps_its_gradient(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * self.w
        with torch.no_grad():
            again = UNCHANGED[name](y)
            scale = again.exp()
        return y.sin() * scale + again.cos() * self.v

    assert_as_eager(_forward(forward, w=_weight(3), v=_weight(3)), (_x(2, 3),))


@pytest.mark.parametrize("call", [lambda h: h.double(), lambda h: h.view(3, 2), lambda h: h[:]])
def test_a_tensor_that_is_made_without_gradients_has_none(call: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * self.w
        with torch.no_grad():
            other = call(y)
        return y.sin().sum() + other.cos().sum()

    assert_as_eager(_forward(forward, w=_weight(3)), (_x(2, 3),))


@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 3, 3)])
def test_cumulative_averages_of_batch_norms_are_those_of_eager(shape: tuple[int, ...]) -> None:
    norm = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(4, momentum=None)
    program = assert_as_eager(
        _forward(lambda self, x: self.norm(x * self.w), w=_weight(*shape[1:]), norm=norm), (_x(*shape),)
    )
    assert set(program.mutations) == {f"norm.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")}


def test_running_statistics_are_those_of_eager() -> None:
    program = assert_as_eager(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (_x(8, 4),))
    assert program.mutations == ("1.num_batches_tracked",)
    (norm,) = calls(program, aten.batch_norm.default)
    assert {str(node) for node in norm.args[3:5]} == {program.buffers[f"1.running_{n}"] for n in ("mean", "var")}


def test_running_statistics_count_even_where_the_output_does_not() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.norm(x)
        return x * self.w

    program = assert_as_eager(_forward(forward, w=_weight(4), norm=nn.BatchNorm1d(4)), (_x(8, 4),))
    assert len(calls(program, aten.batch_norm.default)) == 1


def test_requires_grad_follows_the_parameters() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * self.w
        return torch.where(y > 0, y, x * self.frozen) + y.detach()

    model = _forward(forward, w=_weight(3), frozen=nn.Parameter(torch.ones(3), requires_grad=False))
    program = assert_as_eager(model, (_x(2, 3),))
    grads = {str(node.target): node.meta["tensor"].requires_grad for node in calls(program)}
    assert grads == {
        "aten.mul.Tensor": False,
        "aten.gt.Scalar": False,
        "aten.where.self": True,
        "aten.detach.default": False,
        "aten.add.Tensor": True,
    }
    assert calls(program, aten.mul.Tensor)[0].meta["tensor"].requires_grad


def test_the_graph_is_never_exported_again() -> None:
    source = inspect.getsource(tracing)
    assert source.count("export.export(") == 1 and "run_decompositions" not in source


# Autocast


def _autocast_model(self: Any, x: Tensor) -> Tensor:
    hidden = self.norm(self.first(x)).softmax(-1)
    with torch.autocast("cpu", enabled=False):
        hidden = hidden.float() * 2
    return F.mse_loss(self.second(hidden), x)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_becomes_casts(where: str) -> None:
    modules = {"first": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "second": nn.Linear(8, 4)}

    def inside(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _autocast_model(self, x)

    model, x = _forward(_autocast_model if where == "around" else inside, **modules), _x(8, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
        program = capture(model, (x,), {})
        expected = model(x)
    linear = calls(program, aten.linear.default)
    assert [node.meta["tensor"].dtype for node in linear] == [torch.bfloat16] * 2
    assert all(node.meta["tensor"].dtype == torch.bfloat16 for call in linear for node in call.all_input_nodes)
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    found = run(program, dict(model.named_parameters()), {}, [x])
    found.backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


# What a Program says


def test_placeholders_come_in_order_and_only_if_used() -> None:
    def forward(self: Any, x: Tensor, flag: bool, unused: Tensor, pair: tuple[Tensor, Tensor]) -> Any:
        assert flag
        return x * self.w + self.b + pair[1] + torch.tensor([1.0, 2.0, 3.0])

    model = _forward(forward, w=_weight(3), unused_weight=_weight(3), b=torch.ones(3), unused_buffer=torch.ones(3))
    program = assert_as_eager(model, (_x(2, 3), True, _x(7), (_x(5), _x(3))))
    placeholders = list(program.placeholders())
    assert set(program.parameters) == {"w"} and set(program.buffers) == {"b"} and len(program.constants) == 1
    used = [name for name in program.inputs if name is not None]
    maps = (program.parameters.values(), program.buffers.values(), program.constants, used)
    assert placeholders == [name for names in maps for name in names]
    assert [name is None for name in program.inputs] == [False, True, True, True, False]
    assert program.input_values[1] is True
    assert program.input_values[2] == TensorInfo((7,), torch.float32)
    assert program.input_names == ("args[0]", "args[1]", "args[2]", "args[3][0]", "args[3][1]")


def test_inputs_are_named_after_the_arguments_of_forward() -> None:
    assert _captured("resnet").input_names == ("images_BCHW", "labels_B")


def test_a_tied_weight_is_one_placeholder_under_its_first_name() -> None:
    program = _captured("gpt2")
    assert program.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in program.parameters
    weight = program.placeholders()[program.parameters["transformer.wte.weight"]]
    assert {node.target for node in weight.users} == {aten.embedding.default, aten.linear.default}


def test_calls_name_their_module() -> None:
    program = _captured("llama")
    modules = [node.meta["module"] for node in calls(program, aten.linear.default)]
    assert modules[6:8] == ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"]
    assert calls(program, CROSS_ENTROPY)[0].meta["module"] == ""


def test_outputs_keep_their_structure_with_none_and_numbers() -> None:
    model = _forward(lambda self, x: {"y": x * self.w, "none": None, "n": x.shape[0], "x": (x,)}, w=_weight(3))
    program = assert_as_eager(model, (_x(2, 3),), loss=lambda output: output["y"].sum())
    assert program.num_outputs == 4 and program.output[1:3] == (None, 2)


def test_equal_models_have_equal_fingerprints() -> None:
    family = FAMILIES["mlp"]
    first, second = (capture(family.build(), *family.inputs(seed)).fingerprint for seed in (0, 1))
    larger = capture(family.build(), (torch.ones(8, 32),), {}).fingerprint
    assert first == second != larger


def test_a_cache_is_never_returned() -> None:
    args, kwargs = FAMILIES["llama"].inputs(0)
    model: Any = FAMILIES["llama"].build()
    program = capture(model, args, {**kwargs, "use_cache": True})
    assert program.num_outputs == 2 and True in program.input_values
    assert model.config.use_cache is True, "the user's configuration is left alone"


# What happens to the user's model


def test_capture_leaves_the_model_as_it_was() -> None:
    model = FAMILIES["resnet"].build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, *FAMILIES["resnet"].inputs(0), training=False)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_skeleton_has_ties_and_names_but_no_memory() -> None:
    model = FAMILIES["gpt2"].build()
    bare: Any = skeleton(model)
    assert all(tensor.is_meta for tensor in (*bare.parameters(), *bare.buffers()))
    assert [name for name, _ in bare.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert bare.lm_head.weight is bare.transformer.wte.weight
    args, kwargs = FAMILIES["gpt2"].inputs(0)
    assert capture(bare, args, kwargs).fingerprint == _captured("gpt2").fingerprint


def test_inputs_and_model_may_be_meta() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(2**20, 2**20), torch.empty(8, 2**20)
    assert calls(capture(model, (x,), {}))[0].meta["tensor"].shape == (8, 2**20)


def test_a_frozen_norm_stays_frozen_while_its_model_trains() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].eval()
    program = capture(model, (_x(4, 3),), {}, training=True)
    assert program.training and not program.mutations


# What cannot be captured says so


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: x * self.w if x.sum() > 0 else x, r"value of a tensor.*torch\.where.*layerdrop"),
        (lambda self, x: (x * self.w)[: int(x[0, 0])], "value of a tensor|turns a tensor's value into a number"),
        (lambda self, x: x * self.w.detach().mul_(2), "writes into the parameter w.*buffer"),
        (lambda self, x: x.mul_(2) * self.w, "writes into its input.*clone"),
        (lambda self, x: x @ self.missing, r"cannot be traced at test_export.py:\d+, in .*: AttributeError.*eagerly"),
        (lambda self, x: (x * self.w).expand(2, 2, 3).contiguous().numpy(), "cannot be traced"),
    ],
)
def test_an_impossible_capture_says_what_to_do(forward: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(_forward(forward, w=_weight(3)), (_x(2, 3),), {})


def test_the_first_error_is_the_cause() -> None:
    with pytest.raises(CaptureError) as found:
        capture(_forward(lambda self, x: x @ self.missing), (_x(2, 3),), {})
    assert isinstance(found.value.__cause__, AttributeError)


def test_a_written_attribute_must_be_a_buffer() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.w

    model = _forward(forward, w=_weight(3))
    model.count = torch.zeros(1)
    with pytest.raises(CaptureError, match=r"count.*register_buffer"):
        capture(model, (_x(2, 3),), {})


def test_an_attribute_without_value_must_be_a_buffer() -> None:
    model = _forward(lambda self, x: x * self.scale)
    model.scale = torch.ones(3, device="meta")
    with pytest.raises(CaptureError, match=r"scale.*value is not there.*buffer"):
        capture(model, (_x(2, 3),), {})


def test_tensors_without_memory_stay_that_while_a_model_is_captured() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counted:
        with unseen():
            found = torch.ones(4, 4) @ torch.ones(4, 4)
        assert isinstance(found, FakeTensor) and not counted.get_total_flops()
