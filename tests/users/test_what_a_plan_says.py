"""Facts that a plan states: model, inputs, speed and one device; in the table, the page and the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.decision_rows import ACTIVATIONS, KEPT_WEIGHTS
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.models.named import named
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.settings import context_of
from tests.support.parity import MODELS
from tests.support.ranks import Ranks

MESH = Mesh({"dp": 2, "tp": 2})


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [MESH, Mesh({"pp": 2, "tp": 2})], ids=["whole", "pipeline"])
def test_a_plan_says_what_it_is_for_in_table_page_and_file(mesh: Mesh, tmp_path: Path) -> None:
    model, inputs = named("demo", 8, 32, 2)
    plan = autopar.plan(model, mesh, inputs, precision="bf16-mixed", microbatches=2)
    specified = plan.workload
    assert specified is not None and (specified.model, specified.samples, specified.tokens) == ("LanguageModel", 8, 256)
    assert (specified.parameters, specified.compute, specified.microbatches) == ("float32", "bfloat16", 2)
    assert specified.num_parameters == sum(each.numel() for each in model.parameters())
    assert specified.tokens_per_second == pytest.approx(256 / specified.seconds)
    assert (
        specified.mfu(4) == pytest.approx(specified.ideal_seconds / 4 / specified.seconds) and 0 < specified.mfu(4) < 1
    )

    plan.save(tmp_path / "plan.json")
    plan.to_html(tmp_path / "plan.html")
    loaded = (Plan if isinstance(plan, Plan) else PipelinePlan).load(tmp_path / "plan.json")
    assert loaded.workload == specified
    page = (tmp_path / "plan.html").read_text()
    for text in (str(plan), str(loaded), page):
        for words in (
            "LanguageModel, 5.22 M parameters in float32, computed in bfloat16",
            "2 micro-batches of ids int64[4, 32], labels int64[4, 32]",
            f"{specified.tokens_per_second:,.0f} tokens/s; MFU ",
            "no recomputation",
            "without communication, ",
        ):
            assert words in _words(text)


def test_one_device_takes_what_a_plan_for_one_device_takes() -> None:
    model, inputs = named("demo", 8, 32, 2)
    alone = autopar.plan(model, Mesh({"dp": 1}), inputs)
    specified = autopar.plan(model, MESH, inputs, memory="30MB").workload
    assert specified is not None
    assert specified.one_device.seconds == pytest.approx(alone.device_seconds)
    assert specified.one_device.num_bytes == alone.peak_bytes and specified.one_device.capacity == 30_000_000
    assert not specified.one_device.fits


@pytest.mark.sample(4)
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "spectra"])  # no bf16 of complex numbers
def test_one_device_of_any_family_takes_what_a_plan_for_one_device_takes(name: str, precision: str | None) -> None:
    args, kwargs = MODELS[name].inputs(0)
    alone, split = (
        autopar.plan(MODELS[name].build(), Mesh(axes), kwargs or args, hardware="cpu", precision=precision)
        for axes in ({"dp": 1}, {"dp": 2, "tp": 2})
    )
    assert split.workload is not None
    assert split.workload.one_device.seconds == pytest.approx(alone.device_seconds)
    assert split.workload.one_device.num_bytes == alone.peak_bytes


@pytest.mark.slow
def test_gathered_weights_that_are_saved_are_a_part_of_memory_by_name() -> None:
    model, inputs = named("demo", 8, 32, 2)
    saved = autopar.plan(model, MESH, inputs, strategy="zero2")
    again = autopar.plan(model, MESH, inputs, strategy="zero3")
    assert saved.memory is not None and again.memory is not None
    whole = sum(each.numel() * each.element_size() for each in model.parameters())
    assert 0.3 * whole < saved.memory.parts[KEPT_WEIGHTS] <= whole and KEPT_WEIGHTS not in again.memory.parts
    for plan in (saved, again):
        assert plan.memory is not None and sum(plan.memory.parts.values()) == plan.peak_bytes
        context = context_of(plan)
        assert memory_use(context.memory_model, context.choices, plan.recompute)[0] == plan.peak_bytes
    assert saved.memory.parts[ACTIVATIONS] < 2 * again.memory.parts[ACTIVATIONS]
    assert f"{KEPT_WEIGHTS} " in _words(str(saved))
    assert saved.reprice().memory[f"memory/{KEPT_WEIGHTS}"] == saved.memory.parts[KEPT_WEIGHTS]


def test_rows_that_an_annotation_pins_are_marked_and_those_of_a_preset_are_not(tmp_path: Path) -> None:
    model = Layers()
    autopar.annotate(model, "up", tp="column")
    plan = autopar.plan(model, MESH, (torch.zeros(8, 64),))
    pinned = {row.module.split(".")[0] for row in plan.rows if row.pinned}
    assert pinned == {"up"} and "linear *" in str(plan) and "pinned by an annotation" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert [row.pinned for row in Plan.load(tmp_path / "plan.json").rows] == [row.pinned for row in plan.rows]
    requested = plan.what_if("down", tp="row")
    assert {row.module.split(".")[0] for row in requested.rows if row.pinned} == {"up", "down"}
    plan.verify()
    preset = autopar.plan(Layers(), MESH, (torch.zeros(8, 64),), strategy="megatron")
    assert not any(row.pinned for row in preset.rows) and "pinned" not in str(preset)


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    model, inputs = named("demo", 8, 32, 2)
    plan = autopar.plan(model, MESH, inputs)
    piped = autopar.plan(model, Mesh({"pp": 2, "tp": 2}), inputs, microbatches=2)
    other = plan.what_if("layers.*.mlp.down_proj", tp="row")
    explained = plan.explain("layers.1.mlp.up_proj", alternatives=False)
    for found in (plan, piped, plan.timeline(), plan.diff(other), explained):
        assert max(map(len, str(found).splitlines())) <= columns, str(found)


def test_what_is_printed_is_short() -> None:
    model, inputs = named("demo", 8, 32, 2)
    plan = autopar.plan(model, MESH, inputs)
    timeline = plan.timeline()
    assert len(str(timeline)) < 3000 and "longest tasks" in str(timeline) and "compute " in str(timeline)
    assert f"step of {1e3 * timeline.seconds:.2f} ms: computing" in str(timeline)
    assert repr(timeline).startswith(f"Timeline({len(timeline.events)} events on ")
    assert repr(plan).startswith("Plan(dp=2 × tp=2, ") and len(repr(plan)) < 200


@pytest.mark.slow
def test_words_of_our_own_are_not_on_screen() -> None:
    model, inputs = named("demo", 8, 32, 1)
    plan = autopar.plan(model, MESH, inputs, memory="15MB")
    assert context_of(plan).row is not None, "the limit counts"
    explained = plan.explain("layers.0.mlp.up_proj", alternatives=False)
    for text in map(str, (plan, explained, plan.diff(plan.what_if("layers.*.mlp.down_proj", tp="row")))):
        for word in ("hub", "kept", " held", "bound ", ", several moments", "multiplier", " once "):
            assert word not in text.replace("lower bound ", ""), f"{word!r} in\n{text}"


def _devices() -> tuple[str, bool]:
    found = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled = autopar.compile(Layers(), found, example_inputs=(torch.zeros(8, 64),), hardware="h100")
    assert compiled.plan.workload is not None
    return compiled.plan.workload.device, "h100, of another device than the one of this run, cpu" in _words(
        str(compiled.plan)
    )


def test_a_compiled_module_says_that_its_profile_is_of_another_device(ranks: Ranks) -> None:
    assert ranks.run(_devices, world_size=2) == [("cpu", True)] * 2
