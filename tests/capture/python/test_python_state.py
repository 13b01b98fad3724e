"""Python state that a forward reads and writes besides its inputs: recorded, watched, or refused by name."""

from __future__ import annotations

import itertools
import os
import random
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from random import uniform
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture, skeleton
from autopar.capture.python.grad_mode import of_this_call
from autopar.errors import CaptureError
from autopar.ir.program.python_state import PythonState, Watch

SCALE = 2.0
TABLE = {"scale": 2.0}
CALLS = 0
GENERATOR = random.Random(0)
GENERATORS = [random.Random(0)]


class Config:
    """An object of the user's, as models keep their hyperparameters in."""

    depth = 1

    def __init__(self) -> None:
        self.beta = 1.0
        self.unread = 1.0
        self.windows = [1, 2]


def _model(forward: Callable[..., Any], **attributes: Any) -> Any:
    model: Any = type("Model", (nn.Module,), {"forward": forward, "calls": 0})()
    model.w = nn.Parameter(torch.ones(4))
    for name, value in attributes.items():
        setattr(model, name, value)
    return skeleton(model)


def _captured(model: nn.Module) -> PythonState:
    return capture(model, (torch.ones(2, 4),), {}, training=True).python


def _names(state: PythonState) -> list[str]:
    return [place.name for place in state.read]


def _k(self: Any, x: Tensor) -> Tensor:
    return x * self.w * self.k


@pytest.mark.parametrize("other", [4, 3.0, None, torch.float16])
def test_an_attribute_that_was_read_is_watched_by_value_and_type(other: Any) -> None:
    model = _model(_k, k=3)
    state = _captured(model)
    watch = Watch(model, state)
    assert _names(state) == ["forward", "k"]
    assert watch.holds()
    model.k = other
    assert not watch.holds()
    model.k = int("3")
    assert watch.holds()


def test_an_attribute_that_is_not_read_may_change() -> None:
    model = _model(_k, k=3, step=0)
    watch = Watch(model, _captured(model))
    model.step = 1
    assert watch.holds()


def test_an_attribute_that_was_missing_is_watched() -> None:
    model = _model(lambda self, x: x * self.w * getattr(self, "delta", 1))
    watch = Watch(model, _captured(model))
    assert watch.holds()
    model.delta = 2
    assert not watch.holds()


def _change_beta(model: Any) -> None:
    model.config.beta = 2.0


def _change_window(model: Any) -> None:
    model.config.windows[1] = 5


def _change_class(model: Any) -> None:
    model.config.depth = 2


def _change_config(model: Any) -> None:
    model.config = Config()
    model.config.beta = 3.0


def _config(self: Any, x: Tensor) -> Tensor:
    return x * self.w * self.config.beta * self.config.depth * self.config.windows[1]


@pytest.mark.parametrize("change", [_change_beta, _change_window, _change_class, _change_config])
def test_what_an_object_holds_is_watched_as_far_as_it_is_read(change: Callable[[Any], None]) -> None:
    model = _model(_config, config=Config())
    watch = Watch(model, _captured(model))
    model.config.unread = 2.0
    assert watch.holds()
    change(model)
    assert not watch.holds()


@pytest.mark.parametrize("array", [np.ones(4, dtype=np.float32), torch.ones(4), SimpleNamespace(k=[1.0])])
def test_an_array_a_tensor_and_a_namespace_are_watched_by_content(array: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        data = self.data
        return x * self.w * (data.k[0] if isinstance(data, SimpleNamespace) else torch.as_tensor(data))

    model = _model(forward, data=array)
    watch = Watch(model, _captured(model))
    assert watch.holds()
    (model.data.k if isinstance(array, SimpleNamespace) else model.data)[0] = 2.0
    assert not watch.holds()


def _scaled(x: Tensor) -> Tensor:
    return x * SCALE * TABLE["scale"]


def test_globals_of_the_users_files_are_watched_through_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(lambda self, x: _scaled(x * self.w))
    watch = Watch(model, _captured(model))
    assert watch.holds()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", 3.0)
        assert not watch.holds()
    assert watch.holds()
    monkeypatch.setitem(TABLE, "scale", 3.0)
    assert not watch.holds()


def test_closures_and_the_environment_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    k = 2.0

    def forward(self: Any, x: Tensor) -> Tensor:
        return x * self.w * k * float(os.environ.get("AUTOPAR_TEST_SCALE", "1"))

    model = _model(forward)
    watch = Watch(model, _captured(model))
    assert watch.holds()
    with monkeypatch.context() as patch:
        patch.setenv("AUTOPAR_TEST_SCALE", "2")
        assert not watch.holds()
    assert watch.holds()
    k = 3.0
    assert not watch.holds()


def _count(self: Any, x: Tensor) -> Tensor:
    self.state += 1
    return x * self.w


def _count_in_module(self: Any, x: Tensor) -> Tensor:
    self.config.beta = self.config.beta * 0.5
    return x * self.w


def _count_globally(self: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * self.w


def _step(self: Any, x: Tensor) -> Tensor:
    self.state = self.state + 1
    return x * self.w / self.state


def _append(self: Any, x: Tensor) -> Tensor:
    self.state.append(x)
    return x * self.w


def _count_by_name(self: Any, x: Tensor) -> Tensor:
    self.state["calls"] += 1
    return x * self.w


def _append_inside(self: Any, x: Tensor) -> Tensor:
    self.state["losses"].append(1)
    return x * self.w


def _remember(self: Any, x: Tensor) -> Tensor:
    previous, self.state = self.state, x
    return x * self.w if previous is None else (x - previous) * self.w


class Meter:
    """Counts."""

    def __init__(self, calls: int) -> None:
        self.calls = calls


def _count_in_dict(self: Any, x: Tensor) -> Tensor:
    self.__dict__["state"] = self.state + 1
    return x * self.w


def _count_in_class(self: Any, x: Tensor) -> Tensor:
    type(self).calls += 1
    return x * self.w


def _count_in_array(self: Any, x: Tensor) -> Tensor:
    self.state[0] += 1
    return x * self.w


def _count_in_object(self: Any, x: Tensor) -> Tensor:
    self.state.calls += 1
    return x * self.w


def _count_in_new_objects(self: Any, x: Tensor) -> Tensor:
    self.state = Meter(self.state.calls + 1)
    return x * self.w


def _count_with_iterator(self: Any, x: Tensor) -> Tensor:
    return x * self.w * next(self.state)


@pytest.mark.parametrize(
    ("forward", "state", "message"),
    [
        (_count_in_dict, 0, r"changes state with every call.*to 1, then to 2"),
        (_count_in_class, 0, r"changes Model.calls with every call.*to 1, then to 2"),
        (_count_in_array, np.zeros(2), r"changes the ndarray state"),
        (_count_in_object, Meter(0), r"changes state.calls with every call.*to 1, then to 2"),
        (_count_in_new_objects, Meter(0), r"writes a Meter into state.*which the next call reads"),
        (
            _count_with_iterator,
            itertools.count(),
            r"reads state \(.*\), a count, which gives another value in every call",
        ),
        (_count, 0, r"changes state with every call \(.*test_python_state.py:\d+\): to 1, then to 2.*buffer"),
        (_count_in_module, 0, r"changes config.beta with every call.*to 0.5, then to 0.25.*buffer"),
        (_count_globally, 0, r"changes CALLS with every call.*to 1, then to 2.*argument"),
        (_step, torch.zeros(()), r"writes a tensor into state \(.*py:\d+\), which the next call reads.*buffer"),
        (_append, [], r"changes the list state \(.*py:\d+\).*buffer"),
        (_count_by_name, {"calls": 0}, r"changes state with every call.*to {'calls': 1}, then to {'calls': 2}.*buffer"),
        (_append_inside, {"losses": []}, r"changes state\['losses'\] with every call: to \[1\], then to \[1, 1\]"),
        (_remember, None, r"writes a tensor into state .*which the next call reads.*buffer"),
    ],
)
def test_what_goes_from_one_call_to_the_next_is_refused(forward: Any, state: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        _captured(_model(forward, state=state, config=Config()))
    assert CALLS == 0


def _table_once(self: Any, x: Tensor) -> Tensor:
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = torch.arange(x.shape[1]).float().cos()
    return x * self.w * self.table


def _table_by_size(self: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in self.tables:
        self.tables[x.shape[1]] = torch.arange(x.shape[1]).float().cos()
    return x * self.w * self.tables[x.shape[1]]


@pytest.mark.parametrize("forward", [_table_once, _table_by_size])
def test_a_cache_of_what_every_call_would_compute_is_no_state(forward: Any) -> None:
    state = _captured(_model(forward, table=None, tables={}))
    assert not state.written and not state.lost


def test_a_flag_of_the_first_call_is_left_as_the_call_leaves_it() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.rows = x.shape[0]
        if self.first:
            self.first = False
            return x * self.w * 10
        return x * self.w

    model = _model(forward, first=True)
    state = _captured(model)
    watch = Watch(model, state)
    assert not state.settled and watch.holds() and model.first
    watch.leave_written()
    assert not watch.holds() and not model.first and model.rows == 2


def test_a_flag_that_changes_no_result_asks_for_no_second_plan() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "regression"
        return x * self.w

    model = _model(forward, kind=None)
    watch = Watch(model, _captured(model))
    watch.leave_written()
    assert model.kind == "regression" and watch.holds()


def test_a_container_of_sizes_is_left_as_the_call_leaves_it() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.sizes["rows"] = x.shape[0]
        self.order.clear()
        self.order.append("first")
        return x * self.w

    model = _model(forward, sizes={"rows": 0}, order=["none"])
    watch = Watch(model, _captured(model))
    watch.leave_written()
    assert (model.sizes, model.order) == ({"rows": 2}, ["first"]) and watch.holds()


def test_an_intermediate_result_that_is_written_is_named() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.hidden = x * self.w
        return self.hidden.sum()

    assert [place.name for place in _captured(_model(forward)).lost] == ["hidden"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda self: random.random(), r"calls random.random\(\) \(.*py:\d+\).*torch's random operations"),
        (lambda self: uniform(0, 1), r"calls random.uniform\(\)"),
        (lambda self: np.random.rand(), r"calls numpy.random.rand\(\)"),
        (lambda self: GENERATOR.random(), r"calls random.Random.random\(\) \(.*py:\d+\).*torch's random operations"),
        (lambda self: GENERATORS[0].gauss(0, 1), r"calls random.Random.gauss\(\)"),
        (lambda self: random.Random().random(), r"calls random.Random.random\(\)"),
        (lambda self: np.random.default_rng().random(), r"calls numpy.random.default_rng\(\)"),
        (lambda self: self.generator.random(), "draws from generator, a Generator"),
        (lambda self: torch.rand(4, generator=self.torchs), "draws from torchs .*, a torch.Generator.*seed="),
        (lambda self: time.time(), r"calls time.time\(\).*measure around the model"),
        (lambda self: datetime.now().second, r"calls datetime.now\(\)"),
        (lambda self: torch.manual_seed(0) and 1, r"calls torch.manual_seed\(\).*seed outside the model"),
    ],
)
def test_random_numbers_that_are_not_torchs_clocks_and_seeds_are_refused(draw: Any, message: str) -> None:
    model = _model(
        lambda self, x: x * self.w * draw(self), generator=np.random.default_rng(0), torchs=torch.Generator()
    )
    with pytest.raises(CaptureError, match=message):
        _captured(model)


def test_other_threads_may_ask_while_a_forward_is_captured() -> None:
    def ask(self: Any) -> int:
        with ThreadPoolExecutor(1) as others:
            assert others.submit(lambda: time.time() + random.random() + datetime.now().year).result() > 2000
        return 1

    _captured(_model(lambda self, x: x * self.w * ask(self)))


def test_sources_are_as_they_were_after_a_refusal() -> None:
    before = random.random, time.time, datetime, nn.Module.__setattr__, dict(vars(random.Random))
    with pytest.raises(CaptureError):
        _captured(_model(lambda self, x: x * self.w * random.random()))
    after = random.random, time.time, datetime, nn.Module.__setattr__, dict(vars(random.Random))
    assert after == before
    assert "__getattribute__" not in vars(nn.Module)


def _asking(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        assert not torch.is_grad_enabled()
    return x * self.w if torch.is_grad_enabled() else x * self.w * 2


def test_a_forward_that_asks_for_gradients_is_told_of_the_call() -> None:
    model = _model(_asking)
    captured = {}
    for name, mode in (("on", torch.enable_grad), ("off", torch.no_grad), ("inference", torch.inference_mode)):
        with mode(), of_this_call(), torch.inference_mode(False), torch.enable_grad():
            program = capture(model, (torch.ones(2, 4),), {})
        captured[name] = program.fingerprint, Watch(model, program.python)
    assert captured["on"][0] != captured["off"][0] == captured["inference"][0]
    with torch.no_grad():
        assert [name for name, (_, watch) in captured.items() if watch.holds()] == ["off", "inference"]
    assert [name for name, (_, watch) in captured.items() if watch.holds()] == ["on"]


def test_another_default_dtype_is_another_kind() -> None:
    model = _model(lambda self, x: x * self.w + torch.zeros(4))
    watch = Watch(model, _captured(model))
    torch.set_default_dtype(torch.float64)
    try:
        assert not watch.holds()
    finally:
        torch.set_default_dtype(torch.float32)
    assert watch.holds()


def test_what_a_forward_prints_and_warns_of_is_stated_when_it_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        print("rows", x.shape[0])
        warnings.warn("captured", stacklevel=1)
        return x * self.w

    with pytest.warns(UserWarning, match="captured"):
        _captured(_model(forward))
    assert capsys.readouterr().out == "rows 2\n"


def test_numbers_from_a_seed_that_the_forward_names_are_the_same_in_every_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x * self.w * random.Random(3).random() + float(np.random.default_rng(3).random())

    assert capture(_model(forward), (torch.ones(2, 4),), {}).num_outputs == 1
