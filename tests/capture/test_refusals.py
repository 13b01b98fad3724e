"""Tensors and operations that a graph cannot hold, and models that cannot be copied, are refused by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, CaptureError
from autopar.ir.sharding.mesh import Mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch calls some of these forms beta, others deprecated
FORMS: dict[str, Callable[[], Tensor]] = {
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
}


class Holding(nn.Module):
    """A model that keeps a tensor, or gets one."""

    def __init__(self, how: str, tensor: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        if how == "a parameter":
            self.kept = nn.Parameter(tensor, requires_grad=False)
        elif how == "a buffer":
            self.register_buffer("kept", tensor)
        elif how == "an attribute":
            self.kept = tensor
        elif how == "a list":
            self.kept = [tensor]

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        kept = getattr(self, "kept", other)
        return torch.mm(kept[0] if isinstance(kept, list) else kept, self.weight).sum() + x.sum()  # type: ignore[arg-type]


def planned(model: nn.Module, *inputs: Tensor) -> autopar.Plan:
    return autopar.plan(model, autopar.Mesh({"dp": 2}), inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["a parameter", "a buffer", "an attribute", "a list", "an input"])
def test_a_tensor_that_is_not_dense_is_refused(form: str, how: str) -> None:
    tensor = FORMS[form]()
    given = (torch.ones(4), tensor) if how == "an input" else (torch.ones(4),)
    with pytest.raises(AutoparError) as found:
        planned(Holding(how, tensor), *given)
    named = {"a parameter": "kept", "a buffer": "kept", "an input": "other"}
    if how in named:
        assert re.match(rf"{named[how]} is a {form} tensor, and autopar splits dense ones only; give", str(found.value))


@pytest.mark.parametrize("made", ["to_sparse", "to_sparse_csr"])
def test_a_forward_that_makes_a_sparse_tensor_is_refused(made: str) -> None:
    class Making(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.mm(getattr(input, made)(), self.weight).sum()

    with pytest.raises(CaptureError, match=rf"what aten\.{made}\.default gives in the forward is a sparse_\w+ tensor"):
        planned(Making(4, 4), torch.eye(4))


def test_an_operation_whose_shapes_depend_on_values_is_refused_with_a_way_out() -> None:
    class Solving(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.linalg.lstsq(self.weight, input).solution.sum()

    with pytest.raises(CaptureError, match=r"what aten\.linalg_lstsq\.default gives.*depends on .*custom_op"):
        planned(Solving(4, 4), torch.ones(4, 4))


@torch.library.custom_op("autopar_tests::sum_and_parts", mutates_args=())
def sum_and_parts(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.sum(), [x.clone(), x.clone()]


@sum_and_parts.register_fake
def _(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.new_empty(()), [torch.empty_like(x), torch.empty_like(x)]


def test_an_operation_that_gives_a_list_among_others_is_refused() -> None:
    class Parts(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            total, (one, _) = sum_and_parts(input)
            return (self.weight * one).sum() + total

    with pytest.raises(CaptureError, match=r"sum_and_parts.* lists of tensors among other outputs.* give one list"):
        planned(Parts(4, 4), torch.ones(4, 4))


@pytest.mark.parametrize("kept", [threading.Lock(), (i for i in range(3))])
def test_a_model_that_cannot_be_copied_names_the_attribute(kept: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].kept = kept
    with pytest.raises(
        CaptureError, match=r"the attribute 0\.kept cannot be copied \(TypeError: .*outside of the model"
    ):
        planned(model, torch.ones(4, 4))


class _Packed(nn.Parameter):
    """Weights of four bits, packed as bitsandbytes does."""


_Packed.__module__, _Packed.__qualname__ = "bitsandbytes.nn.modules", "Params4bit"


class _Fused(nn.Linear):
    """A layer of a library with kernels of its own."""


_Fused.__module__, _Fused.__qualname__ = "transformer_engine.pytorch.module.linear", "Linear"


def _of_four_bits() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = _Packed(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    return model


def _of_torchao() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    quantization.quantize_(model[1], quantization.Int8WeightOnlyConfig())
    return nn.Sequential(model)


@pytest.mark.parametrize(
    ("build", "specified"),
    [
        (_of_four_bits, r"^1.weight is a bitsandbytes.nn.modules.Params4bit, .* only; dequantize the model first"),
        (
            _of_torchao,
            r"^0.1.weight is a torchao.quantization.*, .* only; compile the model before",
        ),
        (
            lambda: nn.Sequential(_Fused(8, 8)),
            r"^0 is a transformer_engine.*.Linear, .* Build the model with torch",
        ),
        (
            lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8))),
            r"^0 is a torch.ao.nn.quantized.*.Linear, .* Compile the model before it is quantized",
        ),
    ],
)
def test_quantized_weights_and_fused_modules_are_refused_by_name(
    build: Callable[[], nn.Module], specified: str
) -> None:
    with pytest.raises(CaptureError, match=specified):
        autopar.plan(build(), Mesh({"dp": 2}), (torch.randn(4, 8),))


def test_a_parameter_of_a_plain_subclass_is_like_any_other() -> None:
    class Named(nn.Parameter):
        pass

    model = nn.Linear(8, 8)
    model.weight = Named(torch.ones(8, 8))
    assert autopar.plan(model, Mesh({"dp": 2}), (torch.randn(4, 8),)).rows
