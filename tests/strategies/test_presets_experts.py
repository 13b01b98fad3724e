"""The presets for experts train as one process does, move what their docstrings say, and refuse what they cannot do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import capture
from autopar.errors import StrategyError
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, GROUPED_MM
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets import PRESETS, annotations_for, expert_presets
from autopar.strategies.presets import expert_rows as rows
from tests.strategies.test_presets_volume import BYTES_ALONE, axes_of, formulas, moved, num_bytes
from tests.support.expert_models import CHOSEN, DENSE, EXPERTS, HIDDEN, Decoder, decoder, token_batches
from tests.support.simulation.training import Steps, train_alike

pytest.importorskip("transformers")

LAYERS, BATCH, POSITIONS = 2, 8, 8
AXES = {"d": "dp", "e": "ep", "t": "tp"}
"""Letter of the formulas → a name of the axis."""
CASES = [
    ("expert_data", (2,)),
    ("expert_data", (2, 4)),
    ("expert_model", (2, 4)),
    ("expert_data_model", (2, 2, 2)),
    ("expert_folded", (2,)),
    ("expert_folded", (4, 2)),
]
MOE = "layers.0.moe"
GRID, CUBE = {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2, "tp": 2}


def symbols() -> dict[str, int]:
    """The symbols that the presets' modules explain, of a float32 decoder of two layers."""
    model = Decoder(num_layers=LAYERS)
    tokens = 4 * BATCH * POSITIONS
    return {
        "P": num_bytes(model),
        "N": num_bytes(model, "norm", "before"),
        "X": num_bytes(model, "moe.w"),
        "Q": num_bytes(model, "gate"),
        "A": tokens * HIDDEN,
        "M": tokens * HIDDEN * CHOSEN,
        "G": tokens * CHOSEN,
        "R": tokens,
        "E": EXPERTS,
        "L": LAYERS,
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "shape"), CASES, ids=lambda value: str(value).replace(", ", "x"))
def test_a_step_of_experts_moves_what_the_docstring_says(strategy: str, shape: tuple[int, ...]) -> None:
    axes = axes_of(strategy, shape)
    mesh = Mesh({AXES[letter]: size for letter, size in axes.items()}, "cpu")
    ids = torch.zeros(BATCH, POSITIONS, dtype=torch.int64)
    plan = autopar.plan(Decoder(num_layers=LAYERS), mesh, (ids, ids), strategy=strategy, hardware=BYTES_ALONE)
    found = {(name, axis.replace("p", "")): count for (name, axis), count in moved(plan).items()}
    assert found == formulas(strategy, symbols(), axes)


def test_every_preset_for_experts_has_formulas() -> None:
    named = {name for name, preset in PRESETS.items() if preset.__module__ == expert_presets.__name__}
    assert named == {strategy for strategy, _ in CASES}
    assert named == {name for name in PRESETS if name.startswith("expert_")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("strategy", "form", "mesh"),
    [
        ("expert_model", "sorted", GRID),
        ("expert_folded", "sorted", {"dp": 2, "tp": 2}),
        ("expert_data", "einsum", {"dp": 2, "ep": 2}),
        ("expert_model", "bmm", GRID),
        pytest.param("ulysses", "sorted", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("megatron_sequence", "sorted", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("gather_kv", "sorted", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("megatron_sequence", "sorted", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("expert_data", "sorted", {"dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("expert_data_model", "sorted", CUBE, marks=pytest.mark.slow),
        pytest.param("expert_folded", "sorted", CUBE, marks=pytest.mark.slow),
        *(
            pytest.param(strategy, form, CUBE, marks=pytest.mark.slow)
            for strategy in ("expert_data", "expert_data_model", "expert_folded")
            for form in DENSE
        ),
    ],
    ids=str,
)
def test_experts_train_on_ranks_as_on_one_process(strategy: str, form: str, mesh: Mapping[str, int]) -> None:
    steps = Steps(token_batches(2, batch=8 if mesh is CUBE else 4))
    train_alike(decoder(form), steps, mesh, {"strategy": strategy})


@pytest.mark.parametrize(
    ("strategy", "ends", "products"),
    [("ulysses", "b0", "rrr"), ("gather_kv", "b0", "rrr"), ("megatron_sequence", None, "ook")],
)
def test_rows_of_experts_follow_the_positions_that_a_preset_splits(
    strategy: str, ends: str | None, products: str
) -> None:
    found = choices(strategy, {"tp": 2})
    assert "".join(choice for operation, choice in found if "grouped_mm" in operation) == products
    assert ends is None or {c for operation, c in found if operation.endswith(("dispatch", "combine"))} == {ends}


def test_blocks_of_experts_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program, found = capture(decoder(), (), token_batches(1)[0], training=True), []
    look = rows._in_blocks
    monkeypatch.setattr(rows, "_in_blocks", lambda graph: found.append(graph) or look(graph))
    annotations_for("megatron_sequence", program, Mesh({"tp": 2}, "cpu"))
    assert len(found) == 1


def choices(strategy: str, mesh: Mapping[str, int], form: str = "sorted") -> list[tuple[str, str]]:
    """The operations of the experts with their choices, in order."""
    ids = token_batches(1, batch=8)[0]
    plan = autopar.plan(decoder(form), Mesh(dict(mesh), "cpu"), ids, strategy=strategy, hardware=BYTES_ALONE)
    calls = [row for row in plan.rows if row.kind == "call" and row.module == MOE]
    return [(row.operation, plan.choices[row.name]) for row in calls]


def test_experts_are_folded_over_the_axes_of_attention() -> None:
    program = capture(decoder(), (), token_batches(1)[0], training=True)
    operations = {node.name: node.target for node in program.graph.nodes}

    def specified(mesh: Mapping[str, int]) -> dict[str, tuple[object, ...]]:
        found = annotations_for("expert_folded", program, Mesh(dict(mesh), "cpu"))
        return {
            operations[each.pattern.removeprefix("%")].name(): tuple(what for _, what in each.axes)
            for each in found
            if operations.get(each.pattern.removeprefix("%")) in (DISPATCH, GROUPED_MM, COMBINE)
        }

    everywhere = ("factor:a0+x", "factor:b0+x")
    products = ("factor:x", "factor:x")
    assert specified({"dp": 2, "tp": 2}) == {
        "autopar::dispatch": everywhere,
        "autopar::grouped_mm": products,
        "autopar::combine": everywhere,
    }
    assert specified(CUBE) == {
        "autopar::dispatch": ("factor:a0", *everywhere),
        "autopar::grouped_mm": ("factor:r", *products),
        "autopar::combine": ("factor:a0", *everywhere),
    }


def test_the_features_of_experts_are_columns_and_rows_and_partial_on_the_way_home() -> None:
    found = choices("expert_model", {"tp": 2, "ep": 2})
    assert [choice for operation, choice in found if operation == "grouped_mm"] == ["o x", "o x", "k x"]
    assert {("dispatch", "R a0+x"), ("combine", "P0 a0+x")} < set(found)
    dense = choices("expert_model", GRID, "einsum")
    assert dense[-4:] == [("einsum", "e0 f0"), ("relu", "a d"), ("einsum", "e0 f0"), ("einsum", "g0 P1")]


@pytest.mark.parametrize(
    ("strategy", "mesh", "message"),
    [
        ("expert_data", {"ep": 3}, "splits the batch into 3 parts over ep; found a batch of 4"),
        ("expert_model", {"ep": 2}, "expert_model needs 2 mesh axes, one for experts and one for columns and rows"),
        ("expert_data_model", GRID, "expert_data_model needs 3 mesh axes, one for the batch"),
        (
            "expert_folded",
            {"dp": 4, "tp": 4},
            r"splits experts into 16 parts over dp, tp; \w+ has 8 of them. Use axes whose sizes divide them",
        ),
    ],
)
def test_what_has_no_place_for_experts_is_refused(strategy: str, mesh: Mapping[str, int], message: str) -> None:
    program = capture(decoder(), (), token_batches(1)[0], training=True)
    with pytest.raises(StrategyError, match=message):
        annotations_for(strategy, program, Mesh(dict(mesh), "cpu"))


def test_tokens_that_do_not_divide_over_the_axes_of_experts_are_refused() -> None:
    program = capture(decoder(), (), token_batches(1, batch=2, positions=3)[0], training=True)
    with pytest.raises(StrategyError, match=r"tokens of experts into 4 parts over dp, tp; dispatch_\w+ has 2 along a0"):
        annotations_for("expert_folded", program, Mesh({"dp": 2, "tp": 2}, "cpu"))


def test_a_model_without_experts_is_refused() -> None:
    program = capture(nn.Linear(4, 4), (torch.ones(4, 4),), {}, training=True)
    for strategy in ("expert_data", "expert_folded"):
        with pytest.raises(StrategyError, match=rf"{strategy} divides experts, .* has none, .* Use data_parallel"):
            annotations_for(strategy, program, Mesh({"ep": 2}, "cpu"))


class Normed(nn.Module):
    """A norm between the matrices of an expert, which needs their features whole."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.w1 = nn.Parameter(torch.randn(4, HIDDEN, HIDDEN))
        self.w2 = nn.Parameter(torch.randn(4, HIDDEN, HIDDEN))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_BSD = x_BSD + self.down(self.up(x_BSD).relu())
        mask = self.router(x_BSD).softmax(-1)
        rows = torch.einsum("bse,bsd->ebsd", mask, x_BSD)
        rows = torch.einsum("ebsd,edf->ebsf", rows, self.w1)
        rows = torch.nn.functional.layer_norm(rows, (HIDDEN,))
        return torch.einsum("bse,ebsd->bsd", mask, torch.einsum("ebsf,efd->ebsd", rows, self.w2)).square().mean()


def test_experts_whose_features_stay_whole_are_warned_of() -> None:
    program = capture(Normed(), (torch.ones(4, 2, HIDDEN),), {}, training=True)
    with pytest.warns(UserWarning, match=r"expert_model: experts stay whole on tp in 2 calls \(.*layer_norm"):
        annotations_for("expert_model", program, Mesh(dict(GRID), "cpu"))
