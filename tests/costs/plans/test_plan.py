"""A plan survives being written and read; what is no plan is refused with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.utils import _pytree as pytree

from autopar.costs.hardware.load import load
from autopar.costs.plans.decision_rows import Instant, KeptWhole, MemoryUse, Moved, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.costs.space.call_candidates import layout_candidates
from autopar.costs.space.space import Decision, Space
from autopar.errors import PlanError
from autopar.ir.program.program import Program, TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.planner import make_plan
from autopar.planning.record import choices_of
from tests.support.mutations import mutated
from tests.support.planned import IDS_BS, Attention, space_of

LEAF = pytree.tree_structure(0)
NAMES = st.text(max_size=12)
SECONDS = st.floats(min_value=0, max_value=1e6)
BYTES = st.integers(min_value=0, max_value=2**50)
TRANSFERS = st.lists(st.builds(Moved, NAMES, NAMES, BYTES, SECONDS, st.booleans()), max_size=3).map(tuple)
INSTANTS = st.lists(st.builds(Instant, NAMES, st.booleans(), BYTES), max_size=3).map(tuple)
ROLES = st.tuples(NAMES, NAMES)
ROWS = st.builds(PlanRow, NAMES, NAMES, NAMES, NAMES, ROLES, st.sampled_from(("", "S(0) I")), SECONDS, TRANSFERS)
KEPT_WHOLE = st.builds(
    KeptWhole, NAMES, NAMES, st.integers(1, 99), NAMES, NAMES, SECONDS, SECONDS, BYTES, st.none() | SECONDS
)
AXES = st.dictionaries(st.sampled_from(("dp", "tp", "pp", "ep")), st.integers(1, 512), min_size=2, max_size=2)
PLANS = st.builds(
    Plan,
    mesh=st.builds(Mesh, AXES, st.sampled_from(("cpu", "h100"))),
    fingerprint=NAMES,
    choices=st.dictionaries(NAMES, NAMES, max_size=4),
    descriptions=st.dictionaries(NAMES, NAMES, max_size=4),
    rows=st.lists(ROWS, max_size=4).map(tuple),
    seconds=SECONDS,
    bound=SECONDS,
    peak_bytes=BYTES,
    traffic=st.dictionaries(st.tuples(NAMES, NAMES), BYTES, max_size=4),
    solver=NAMES,
    memory_limit=st.none() | BYTES,
    imbalance=st.floats(1, 1e3),
    unruled=st.none() | st.dictionaries(NAMES, NAMES, max_size=2),
    kept_whole=st.lists(KEPT_WHOLE, max_size=2).map(tuple),
    notes=st.lists(NAMES, max_size=2).map(tuple),
    memory=st.none() | st.builds(MemoryUse, st.dictionaries(NAMES, BYTES, max_size=3), INSTANTS),
    recompute=st.dictionaries(NAMES, st.sampled_from(("none", "full")), max_size=2),
)


def _plan() -> Plan:
    return Plan(
        mesh=Mesh({"dp": 2}),
        fingerprint="f",
        choices={"a": "m"},
        descriptions={"a": "linear"},
        rows=(PlanRow("a", "call", "up", "linear", ("data",), "S(0)", 0.5, (Moved("all_reduce", "dp", 8),)),),
        seconds=0.5,
        bound=0.4,
        peak_bytes=100,
        traffic={("all_reduce", "dp"): 8},
        solver="ilp",
    )


ROW_JSON = json.loads(_plan().to_json())["rows"][0]
FORMULAS = dict.fromkeys(("seconds", "flops", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"), "1")
FORMULAS |= {"whole": "[]"}


@given(PLANS)
def test_a_plan_read_from_its_own_json_is_equal(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert list(again.mesh.axes) == list(plan.mesh.axes)
    assert list(again.choices) == list(plan.choices)


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    _plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == _plan()


def test_the_gap_is_relative_to_the_plan_and_never_negative() -> None:
    assert _plan().gap == pytest.approx(0.2)
    values = {**json.loads(_plan().to_json()), "bound": 0.6}
    assert Plan.from_json(json.dumps(values)).gap == 0.0


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the text is no JSON .* give what Plan.save wrote"):
        Plan.from_json("{")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"format": 0}', '{"format": "1"}'])
def test_json_of_another_format_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"not a plan of format 2"):
        Plan.from_json(text)


@pytest.mark.parametrize("field", [name for name in json.loads(_plan().to_json()) if name != "format"])
def test_a_missing_field_is_refused_unless_it_has_a_default(field: str) -> None:
    values = json.loads(_plan().to_json())
    del values[field]
    optional = (
        "memory_limit",
        "zigzag_axes",
        "imbalance",
        "unruled",
        "recompute",
        "kept_whole",
        "prefetch",
        "reduce_each",
        "mode",
    )
    further = (
        "reserved",
        "offload",
        "host",
        "waits",
        "simulated",
        "host_seconds",
        "multiplier",
        "symbols",
        "formulas",
        "workload",
    )
    if field in (*optional, *further, "comparison"):
        assert Plan.from_json(json.dumps(values)) == _plan()
        return
    with pytest.raises(PlanError, match=f"not a plan: .*'{field}'"):
        Plan.from_json(json.dumps(values))


def test_an_unknown_field_is_refused() -> None:
    values = {**json.loads(_plan().to_json()), "colour": "red"}
    with pytest.raises(PlanError, match=r"not a plan: .*'colour'"):
        Plan.from_json(json.dumps(values))


def test_a_row_with_a_missing_field_is_refused() -> None:
    values = json.loads(_plan().to_json())
    del values["rows"][0]["operation"]
    with pytest.raises(PlanError, match=r"not a plan: .*'operation'"):
        Plan.from_json(json.dumps(values))


def _space(layouts: tuple[str, ...] = ("I", "S(0)"), shape: tuple[int, ...] = (4, 8), name: str = "x") -> Space:
    """One input with a choice of layouts on a mesh of two."""
    graph = fx.Graph()
    node = graph.placeholder(name)
    node.meta["tensor"] = TensorInfo(shape, torch.float32)
    graph.output((node,))
    program = Program(graph, {}, {}, {}, {}, (name,), (), LEAF, LEAF, 1, ())
    mesh = Mesh({"dp": 2})
    space = Space(program, mesh, load("cpu"))
    candidates = layout_candidates(tuple(map(Layout.parse, layouts)))
    space.add(Decision(name, "input", candidates, node, {}))
    return space


def _plan_of(space: Space, choice: str, mesh: Mesh | None = None) -> Plan:
    made = make_plan(space, {})[0]
    return dataclasses.replace(made, mesh=mesh or made.mesh, choices={space.decisions[0].name: choice})


def test_the_choices_of_a_plan_are_found_by_name_in_another_order() -> None:
    plan = _plan_of(_space(("I", "S(0)")), "S(0)")
    assert choices_of(plan, _space(("I", "S(0)"))) == (1,)
    assert choices_of(plan, _space(("S(0)", "S(1)", "I"))) == (0,)


def test_a_plan_for_another_mesh_is_refused_with_both_meshes() -> None:
    plan = _plan_of(_space(), "I", Mesh({"dp": 4}))
    with pytest.raises(PlanError, match=r"the plan is for the mesh dp=4, this mesh is dp=2; plan again"):
        choices_of(plan, _space())


def test_a_plan_for_other_shapes_is_refused_with_the_difference() -> None:
    plan = _plan_of(_space(), "I")
    expected = r"x is input float32\[4, 8\] in the plan and input float32\[6, 8\] here\. Plan again"
    with pytest.raises(PlanError, match=expected):
        choices_of(plan, _space(shape=(6, 8)))


def test_a_plan_for_another_graph_names_what_is_absent() -> None:
    plan = _plan_of(_space(), "I")
    with pytest.raises(PlanError, match=r"x is input float32\[4, 8\] in the plan and absent here; y is absent in the"):
        choices_of(plan, _space(name="y"))


def test_many_differences_are_counted() -> None:
    plan = dataclasses.replace(_plan_of(_space(), "I"), descriptions={f"n{i}": "relu" for i in range(5)})
    with pytest.raises(PlanError, match=r"\(and 3 more differences\)"):
        choices_of(plan, _space())


def test_a_choice_that_is_not_offered_is_refused_with_what_is() -> None:
    plan = _plan_of(_space(("I", "S(1)")), "S(1)")
    with pytest.raises(
        PlanError, match=r'x: the plan chooses "S\(1\)", which is not offered here; offered are I, S\(0\)'
    ):
        choices_of(plan, _space())


def test_a_decision_without_a_choice_is_refused() -> None:
    space = _space()
    plan = dataclasses.replace(_plan_of(space, "I"), choices={})
    with pytest.raises(PlanError, match=r'chooses "nothing", which is not offered here'):
        choices_of(plan, space)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traffic": [["all_reduce", "dp"]]}, r"traffic\[0\] is \['all_reduce', 'dp'\]; needed a list of 3 values"),
        ({"mesh": {"axes": 4, "hardware": "cpu"}}, r"mesh\.axes is 4; needed an object of 1 to 8 values"),
        ({"mesh": {"axes": {"d p": 2}, "hardware": "cpu"}}, "axis name 'd p' is not an identifier"),
        ({"seconds": "0.5"}, "seconds is '0.5'; needed a finite number of at least 0"),
        ({"seconds": -1}, "seconds is -1; needed a finite number of at least 0"),
        ({"bound": math.nan}, "it says NaN; numbers are finite"),
        ({"bound": -math.inf}, "it says -Infinity"),
        ({"peak_bytes": 1.5}, "peak_bytes is 1.5; needed a whole number of at least 0"),
        ({"peak_bytes": True}, "peak_bytes is True; needed a whole number"),
        ({"peak_bytes": 10**400}, "a number of 401 digits, 1000000000…, larger than any float"),
        (
            {"recompute": {"0": "some"}},
            "recompute.0 is 'some'; needed one of 'none', 'selective', 'full_save_collectives', 'full'",
        ),
        ({"rows": [ROW_JSON | {"roles": []}]}, r"rows\[0\]\.roles has 0 words for the 1 axes of the mesh"),
        ({"rows": [ROW_JSON | {"layout": "I I"}]}, r"rows\[0\]\.layout is 'I I' for the 1 axes of the mesh"),
        ({"rows": [ROW_JSON | {"transfers": [["x"]]}]}, r"rows\[0\]\.transfers\[0\] is \['x'\]; needed a list of 5"),
        ({"solver": "\ud800"}, r"solver is '\\ud800'; needed a text"),
        ({"formulas": {"seconds": "1"}}, "formulas lacks 'flops'"),
        ({"formulas": FORMULAS | {"memory": "1/0"}}, "formulas.memory: .* divides by zero"),
        ({"formulas": FORMULAS | {"memory": "9**9**9**9"}}, r"formulas.memory: not a formula: found '\*\*9\*\*9' at"),
        ({"formulas": FORMULAS | {"whole": "1"}}, "formulas.whole: not a list of formulas"),
        (
            {"formulas": FORMULAS | {"all_reduce_over_tp": "1"}},
            "formulas.all_reduce_over_tp: the mesh has no axis 'tp'",
        ),
        (
            {"formulas": FORMULAS | {"all_reduce_over_dp": "1+" * 600 + "1"}},
            "it has 1201 characters; seconds of a coll",
        ),
        (
            {"formulas": FORMULAS | {f"memory/{n}": "1" * 2**18 for n in range(3)}},
            "more than 524288 characters together",
        ),
    ],
    ids=lambda value: None,
)
def test_a_malformed_field_is_refused_by_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"not a plan: .*{message}"):
        Plan.from_json(json.dumps({**json.loads(_plan().to_json()), **changes}))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_is_nested_deep_is_refused(opening: str) -> None:
    with pytest.raises(PlanError, match="it is nested too deep"):
        Plan.from_json(opening * 100_000)


def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"not a plan: '.*nowhere.json': it cannot be read \(No such file or directory\)"
    ):
        Plan.load(tmp_path / "nowhere.json")
    with pytest.raises(PlanError, match=r"it cannot be read \(Is a directory\)"):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match="it is no path"):
        Plan.load("\0")
    path = tmp_path / "plan.json"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(PlanError, match=r"it is no text \(byte 0 is no UTF-8\)"):
        Plan.load(path)
    _plan().save(path)
    text = path.read_text()
    for cut in (0, 1, len(text) // 2, len(text) - 1):
        path.write_text(text[:cut])
        with pytest.raises(PlanError, match="the text is no JSON"):
            Plan.load(path)


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)

    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        dataclasses.replace(_plan(), seconds=0.75).save(path)
    assert Plan.load(path) == _plan() and list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def real_plan() -> Plan:
    """Return a plan with formulas, memory and traffic."""
    space = space_of(Attention(False), (IDS_BS,), load("h100"), dp=2, tp=2)
    return make_plan(space, {})[0].with_formulas()


@pytest.mark.slow
@settings(max_examples=150, deadline=timedelta(seconds=5))
@given(st.randoms(use_true_random=False))
def test_a_plan_that_was_damaged_is_refused_or_can_be_requested(real_plan: Plan, source: random.Random) -> None:
    text = json.dumps(mutated(json.loads(real_plan.to_json()), source))
    try:
        plan = Plan.from_json(text)
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan) and str(plan.diff(real_plan))
    with contextlib.suppress(PlanError):
        assert plan.reprice(batch=8).seconds >= 0


def test_an_axis_of_another_name_is_another_mesh() -> None:
    space = _space()
    renamed = Mesh({"other" + name: size for name, size in space.mesh.axes.items()})
    with pytest.raises(PlanError, match="the plan is for the mesh"):
        choices_of(_plan_of(space, "I", renamed), space)
