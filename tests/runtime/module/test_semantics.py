"""User changes to a model before or after compiling are honoured, or refused by name: modes, hooks, state.

Each worker does the same to a compiled model and to the model itself, on every rank, and asserts there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.families import HIDDEN
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

WAYS = pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
"""Every parameter whole on each rank, which makes plain tensors of them, and split, which makes DTensors."""


class Net(nn.Module):
    """Two layers around a batch norm, with an exponent that forward reads, and a head that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.act = nn.ReLU()
        self.down = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
        h_BD = self.act(self.norm(self.up(x_BD)))
        return self.down(h_BD).square().mean(), self.head(h_BD).square().mean()


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(step))


def compiled(model: nn.Module, strategy: str = "data_parallel", **options: Any) -> Any:
    return autopar.compile(
        model, mesh((2,), ("dp",)), (batch(),), strategy=strategy, hardware=SLOW_DEVICES, **by_flag(**options)
    )


def pair(strategy: str, prepare: Callable[[nn.Module], object] = lambda model: None) -> tuple[Any, Any]:
    """A compiled model and the model; `prepare` was done to both before."""
    eager = Net()
    prepare(eager)
    other = Net()
    prepare(other)
    return compiled(other, strategy), eager


def assert_trains_alike(*models: Any, steps: int = 3, loss: Callable[[Any], Tensor] = lambda out: out[0]) -> None:
    """Losses, gradients and parameters of a few steps with momentum and decay agree, and so do the buffers."""
    found: list[dict[str, Any]] = []
    for model in models:
        seen: dict[str, Any] = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            value = loss(model(batch(step)))
            value.backward()
            seen[f"loss {step}"] = whole(value)
            seen |= {f"{name}.grad {step}": whole(p.grad) for name, p in model.named_parameters()}
            optimizer.step()
        seen |= {name: whole(p) for name, p in (*model.named_parameters(), *model.named_buffers())}
        found.append(seen)
    first, second = found
    assert first.keys() == second.keys()
    for name, value in second.items():
        if value is None or first[name] is None:
            assert first[name] is value, name
        else:
            assert_close(first[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def both(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0] + outputs[1]


def on_ranks(ranks: Ranks, work: Callable[..., None], *args: Any) -> None:
    ranks.run(work, *args, timeout=120)


def _modes(strategy: str) -> None:
    models = pair(strategy)
    assert_trains_alike(*models, steps=1)
    for model in models:
        model.norm.eval()
    assert_trains_alike(*models)
    for model in models:
        model.train()
    assert_trains_alike(*models, steps=1)


@WAYS
def test_a_submodule_in_evaluation_stays_so_until_the_model_is_trained(ranks: Ranks, strategy: str) -> None:
    on_ranks(ranks, _modes, strategy)


def _mode_before(strategy: str) -> None:
    models = pair(strategy, lambda model: model.norm.eval())  # type: ignore[union-attr]
    assert models[0].training and not models[0].norm.training
    assert_trains_alike(*models)


def test_a_submodule_in_evaluation_before_compiling_stays_so(ranks: Ranks) -> None:
    on_ranks(ranks, _mode_before, "zero3")


def _forward_hooks(strategy: str) -> None:
    models = pair(strategy)
    handles = [model.up.register_forward_hook(lambda module, args, out: out * 2) for model in models]
    handles += [model.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,)) for model in models]
    assert_trains_alike(*models)
    planned = len(models[0]._known)
    for handle in handles:
        handle.remove()
    assert_trains_alike(*models, steps=1)
    assert len(models[0]._known) == planned - 1, "what ran with hooks that are gone is let go"


@WAYS
def test_forward_hooks_registered_after_compiling_run_until_removed(ranks: Ranks, strategy: str) -> None:
    on_ranks(ranks, _forward_hooks, strategy)


def _backward_module_hook() -> None:
    model = compiled(Net())
    model.up.register_full_backward_hook(lambda module, grads, outs: None)
    with pytest.raises(autopar.CaptureError, match="backward hook"):
        model(batch())


def test_a_backward_hook_of_a_module_is_refused(ranks: Ranks) -> None:
    on_ranks(ranks, _backward_module_hook)


def _parameter_hooks(strategy: str) -> None:
    seen: list[str] = []
    handles = []

    def prepare(model: Any) -> None:
        handles.append(model.up.weight.register_hook(lambda grad: grad * 4))
        model.down.bias.register_post_accumulate_grad_hook(lambda p: seen.append(type(p).__name__))
        model.head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    models = pair(strategy, prepare)
    assert_trains_alike(*models, loss=both)
    assert len(seen) == 6, "three steps of two models"
    for handle in handles:
        handle.remove()
    assert_trains_alike(*models, loss=both, steps=1)


@WAYS
def test_hooks_of_parameters_are_carried_over_with_their_handles(ranks: Ranks, strategy: str) -> None:
    on_ranks(ranks, _parameter_hooks, strategy)


def _unused(strategy: str) -> None:
    assert_trains_alike(*pair(strategy))
    models = pair(strategy)
    assert_trains_alike(*models, loss=lambda out: out[1])
    assert models[0].down.weight.grad is None


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero2", "zero3"])
def test_a_parameter_that_this_loss_does_not_use_has_no_gradient(ranks: Ranks, strategy: str) -> None:
    on_ranks(ranks, _unused, strategy)


def _unused_over_two_axes(strategy: str) -> None:
    model = autopar.compile(Net(), mesh((2, 2), ("dp", "tp")), (batch(),), strategy=strategy, hardware=SLOW_DEVICES)
    assert_trains_alike(model, Net())


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero3"])
def test_an_unused_parameter_has_no_gradient_over_two_axes(ranks: Ranks, strategy: str) -> None:
    ranks.run(_unused_over_two_axes, strategy, world_size=4, timeout=120)


def _replaced(strategy: str) -> None:
    models = pair(strategy)
    assert_trains_alike(*models, steps=1)
    torch.manual_seed(torch.distributed.get_rank())  # what ranks disagree on: the first one counts
    weight = torch.randn(HIDDEN, HIDDEN)
    torch.distributed.broadcast(agreed := weight.clone(), 0)
    models[0].up.weight = nn.Parameter(weight)
    models[1].up.weight = nn.Parameter(agreed)
    for model in models:
        model.head.bias = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
    assert isinstance(dict(models[0].named_parameters())["up.weight"], DTensor) == (strategy == "zero3")
    assert_trains_alike(*models, loss=both)
    for model in models:
        model.down = copy.deepcopy(nn.Linear(HIDDEN, HIDDEN).requires_grad_(False))
        nn.init.constant_(model.down.weight, 0.1)
        nn.init.constant_(model.down.bias, 0.2)
    assert_trains_alike(*models, loss=both)


@WAYS
def test_a_parameter_put_in_anothers_place_is_stored_as_that_was(ranks: Ranks, strategy: str) -> None:
    on_ranks(ranks, _replaced, strategy)


def _changed_modules() -> None:
    models = pair("zero3")
    for model in models:
        model.act = nn.Tanh()
    assert_trains_alike(*models)


def test_a_module_without_parameters_may_be_another(ranks: Ranks) -> None:
    on_ranks(ranks, _changed_modules)


def _wider(model: Any) -> None:
    model.head = nn.Linear(HIDDEN, 5)


def _of_another_shape(model: Any) -> None:
    model.up.weight = nn.Parameter(torch.ones(HIDDEN, 1))


def _gone(model: Any) -> None:
    del model.up.weight


def _tied(model: Any) -> None:
    model.up.weight = model.down.weight


def _parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.up, "weight", nn.Identity())


def _pruned(model: Any) -> None:
    prune.l1_unstructured(model.up, "weight", amount=0.5)


def _new_layer(model: Any) -> None:
    model.more = nn.Linear(HIDDEN, HIDDEN)


def _around(model: Any) -> None:
    model.up = nn.Sequential(model.up, nn.Linear(HIDDEN, HIDDEN))


def _other_buffer(model: Any) -> None:
    model.norm.running_mean = torch.zeros(1)


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "wider": (_wider, r"head.weight has the shape \[5, 32\] now, and \[4, 32\] when"),
    "another shape": (_of_another_shape, r"up.weight has the shape \[32, 1\] now"),
    "gone": (_gone, "up.weight is gone, which the model was compiled with"),
    "tied": (_tied, "down.weight shares its tensor with up.weight since the model was compiled"),
    "parametrized": (_parametrized, "up.weight is gone"),
    "pruned": (_pruned, "up.weight is gone"),
    "other buffer": (_other_buffer, r"the buffer norm.running_mean is \[1\] of torch.float32 now and was \[32\]"),
    "around a layer": (_around, "up.weight is gone"),
    "new layer": (_new_layer, "the modules have changed since the model was compiled: new are more.weight, more.bias"),
}


def _refused(name: str) -> None:
    model = compiled(Net())
    change, message = REFUSED[name]
    change(model)
    with pytest.raises(InputError, match=message):
        model(batch())


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_of_the_parameters_after_compiling_is_refused_by_name(ranks: Ranks, name: str) -> None:
    on_ranks(ranks, _refused, name)


def _root_hooks() -> None:
    def prepare(model: Any) -> None:
        model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
        model.register_forward_hook(lambda module, args, out: (out[0] + args[0].mean(), out[1]))

    models = pair("data_parallel", prepare)
    for model in models:
        model.register_forward_hook(lambda module, args, out: (out[0] * len(args), out[1]))
    assert_trains_alike(*models)


def test_hooks_of_the_root_get_the_arguments_as_they_were_given(ranks: Ranks) -> None:
    on_ranks(ranks, _root_hooks)


class Counted(Net):
    """Keeps data in its state dict that is in no tensor, and edits what is saved and loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 7

        def on_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[f"{prefix}saved"] = torch.ones(1)

        def before_load(state: dict[str, Any], prefix: str, *_: Any) -> None:
            state.pop(f"{prefix}saved", None)

        self._register_state_dict_hook(on_save)
        self._register_load_state_dict_pre_hook(before_load)
        self.down._register_state_dict_hook(on_save)
        self.down._register_load_state_dict_pre_hook(before_load)

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def _extra_state(strategy: str) -> None:
    eager, model = Counted(), compiled(Counted(), strategy)
    assert model.state_dict().keys() == eager.state_dict().keys()
    assert {"_extra_state", "saved", "down.saved"} <= model.state_dict().keys()
    state = eager.state_dict()
    state["_extra_state"] = {"epoch": 9}
    model.load_state_dict(state)
    assert model.state_dict()["_extra_state"] == {"epoch": 9}
    eager.load_state_dict({name: whole(x) if isinstance(x, Tensor) else x for name, x in model.state_dict().items()})
    assert eager.epoch == 9


@WAYS
def test_extra_state_and_state_dict_hooks_live_on(ranks: Ranks, strategy: str) -> None:
    on_ranks(ranks, _extra_state, strategy)


def _attributes() -> None:
    for strategy in ("data_parallel", "zero3"):
        model = Net()
        model.up.weight.group = "matrices"  # pyright: ignore[reportAttributeAccessIssue]
        found = compiled(model, strategy)
        assert [name for name, p in found.named_parameters() if hasattr(p, "group")] == ["up.weight"]
        assert isinstance(found.norm, nn.BatchNorm1d)


def test_attributes_of_parameters_and_classes_of_modules_are_kept(ranks: Ranks) -> None:
    on_ranks(ranks, _attributes)


def _hooks_on_all_modules() -> None:
    model, alone = pair("zero3")
    assert_trains_alike(model, alone, steps=1)
    handle = register_module_forward_hook(lambda module, args, out: out)
    try:
        with pytest.raises(
            autopar.CaptureError, match=r"is a hook on all modules .* register it on those that it is for"
        ):
            model(batch())
        with pytest.raises(autopar.CaptureError, match="is a hook on all modules"):
            compiled(Net())
    finally:
        handle.remove()
    assert_trains_alike(model, alone, steps=1)


def test_hooks_on_all_modules_are_refused(ranks: Ranks) -> None:
    on_ranks(ranks, _hooks_on_all_modules)
