"""The tables of a plan: what is folded, what is hidden, and that nothing is lost in between."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace

import pytest

from autopar.costs.plans.decision_rows import KeptWhole, MemoryUse, Moved, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.costs.plans.workload import OneDevice, Workload
from autopar.ir.sharding.mesh import Mesh
from autopar.views.report.table import plan_table

MESH = Mesh({"dp": 2, "tp": 4}, hardware="cpu")
ALL_REDUCE = Moved("all_reduce", "tp", 4_000_000)


def _call(
    name: str,
    module: str,
    operation: str = "linear",
    roles: tuple[str, ...] = ("data", "column"),
    transfers: tuple[Moved, ...] = (),
) -> PlanRow:
    return PlanRow(name, "call", module, operation, roles, "S(0) S(2)", 0.001, transfers)


def _parameter(name: str, layout: str) -> PlanRow:
    return PlanRow(f"p_{name}", "parameter", name, "parameter", ("replicated", "S(0)"), layout, 0.0001, ())


def _plan(
    *rows: PlanRow,
    bound: float = 0.0,
    memory_limit: int | None = None,
    kept_whole: tuple[KeptWhole, ...] = (),
    notes: tuple[str, ...] = (),
) -> Plan:
    traffic: dict[tuple[str, str], int] = {}
    for row in rows:
        for collective, axis, num_bytes, *_ in row.transfers:
            traffic[collective, axis] = traffic.get((collective, axis), 0) + num_bytes
    seconds = sum(row.seconds for row in rows)
    return Plan(
        mesh=MESH,
        fingerprint="f",
        choices={},
        descriptions={},
        rows=rows,
        seconds=seconds,
        bound=bound or seconds,
        peak_bytes=3_000_000_000,
        traffic=traffic,
        solver="elimination",
        memory_limit=memory_limit,
        kept_whole=kept_whole,
        notes=notes,
    )


_WORDY = KeptWhole("word::" * 9, "no rule " * 20, 1, "a", "a.b" * 20, 1.0, 0.5, 8)


def _line(table: str, word: str) -> str:
    """The only line of the table with the word, spaces squeezed."""
    found = [line for line in table.splitlines() if word in line]
    assert len(found) == 1, f"{word!r} stands in {len(found)} lines of\n{table}"
    return re.sub(r"\s+", " ", found[0]).strip()


def _deep_plan(num_layers: int) -> Plan:
    rows = []
    for layer in range(num_layers):
        path = f"model.layers.{layer}.mlp"
        rows.append(_parameter(f"{path}.up_proj.weight", "I S(0)"))
        rows.append(_parameter(f"{path}.down_proj.weight", "S(0) S(1)"))
        rows.append(_call(f"up{layer}", f"{path}.up_proj"))
        rows.append(_call(f"silu{layer}", path, "silu"))
        rows.append(_call(f"down{layer}", f"{path}.down_proj", roles=("data", "row"), transfers=(ALL_REDUCE,)))
    return _plan(*rows)


def test_the_header_tells_mesh_time_bound_memory_and_solver() -> None:
    table = plan_table(_plan(_call("a", "head"), bound=0.0009, memory_limit=8_000_000_000))
    assert "dp=2 × tp=4 (8 devices, hardware cpu)" in table
    assert "1.00 ms predicted, optimality gap 10.00%: no plan costs less than 900.0 µs in sum" in table
    assert "3.00 GB per device predicted at the peak, limit 8.00 GB" in table
    assert "elimination" in table


def test_a_step_below_the_bound_of_the_sum_is_not_told_next_to_it() -> None:
    plan = replace(_plan(_call("a", "head"), bound=0.0009), simulated=0.0008)
    assert "800.0 µs predicted, optimality gap 10.00% of the sum of costs, 1.00 ms\n" in plan_table(plan)


def test_a_gap_is_not_rounded_away() -> None:
    assert "optimality gap 0.0015%" in plan_table(_plan(_call("a", "head"), bound=0.001 * (1 - 1.5e-5)))


def test_the_memory_at_the_peak_is_told_part_by_part() -> None:
    memory = MemoryUse({"parameters": 1_000_000, "activations": 2_000_000, "gradients": 0})
    table = plan_table(replace(_plan(_call("a", "head")), memory=memory))
    assert "          activations 2.00 MB, parameters 1.00 MB\n" in table


def test_segments_that_are_computed_again_are_told_as_ranges() -> None:
    modes = {"model.layers.0": "full", "model.layers.1": "full", "model.layers.2": "none", "head.3": "selective"}
    table = plan_table(replace(_plan(_call("a", "head")), recompute=modes))
    assert "in the backward: full in model.layers.0-1, selective in head.3\n" in table
    assert "recomputed" not in plan_table(replace(_plan(_call("a", "head")), recompute={"model.layers.0": "none"}))


def test_a_weight_that_is_kept_after_it_was_gathered_is_told() -> None:
    plan = _plan(_parameter("up.weight", "S(0) I"), _call("a", "up"))
    kept = replace(plan, choices={"p_up.weight": "S(0) I saved"})
    assert "saved: the gathered weight" in plan_table(kept) and "saved" not in plan_table(plan)


def test_a_plan_that_meets_its_bound_is_called_optimal() -> None:
    assert "proven optimal" in plan_table(_plan(_call("a", "head")))
    assert "proven optimal" not in plan_table(_plan(_call("a", "head"), bound=0.0009))


def test_equal_layers_are_one_line_with_the_sum_of_their_costs() -> None:
    table = plan_table(_deep_plan(32))
    assert _line(table, "up_proj") == "model.layers.0-31.mlp.up_proj linear data column dim 0 on tp 32 32.00 ms"
    assert _line(table, "down_proj").endswith("32 32.00 ms all_reduce tp 128.00 MB")
    assert len(table.splitlines()) < 30


def test_a_layer_with_another_choice_has_a_line_of_its_own() -> None:
    rows = [_call(f"up{layer}", f"layers.{layer}.up") for layer in range(6)]
    rows[3] = _call("up3", "layers.3.up", roles=("data", "row"))
    table = plan_table(_plan(*rows))
    assert _line(table, "layers.0-2,4-5.up").startswith("layers.0-2,4-5.up linear data column 5")
    assert _line(table, "layers.3.up").startswith("layers.3.up linear data row 1")


def test_a_layer_stored_in_another_way_has_a_line_of_its_own() -> None:
    table = plan_table(
        _plan(
            _parameter("layers.0.up.weight", "I S(0)"),
            _parameter("layers.1.up.weight", "S(0) S(1)"),
            _call("up0", "layers.0.up"),
            _call("up1", "layers.1.up"),
        )
    )
    assert "layers.0.up linear data column dim 0 on tp 1" in _line(table, "layers.0.up")
    assert "dim 0 on dp, 1" in _line(table, "layers.1.up")


def test_numbers_inside_numbers_fold_too() -> None:
    rows = [_call(f"e{i}_{j}", f"layers.{i}.experts.{j}.up") for i in range(3) for j in range(4)]
    assert _line(plan_table(_plan(*rows)), "experts").startswith("layers.0-2.experts.0-3.up linear data column 12")


def test_elementwise_calls_are_hidden_unless_they_move_something() -> None:
    rows = (
        _call("up", "up"),
        _call("relu", "relu", "relu"),
        _call("mul", "scale", "mul", transfers=(Moved("all_gather", "dp", 16),)),
    )
    table = plan_table(_plan(*rows))
    assert "relu" not in table
    assert _line(table, "scale").endswith("all_gather dp 16 B")
    assert _line(table, "(all other").endswith("1 1.00 ms")


def test_a_verbose_table_shows_every_call_with_its_layout() -> None:
    table = plan_table(_plan(_call("up", "up"), _call("relu", "act", "relu")), verbose=True)
    assert "act relu data column S(0) S(2) 1 1.00 ms" in _line(table, "relu")
    assert "(all other" not in table


def test_the_count_and_the_seconds_of_the_lines_add_up_to_the_total() -> None:
    plan = _deep_plan(5)
    table = re.sub(r"\s+", " ", plan_table(plan))
    counts = [int(count) for count in re.findall(r" (\d+) \d+\.\d+ .s ", table.split("moved per step")[1])]
    assert sum(counts[:-1]) == counts[-1] == len(plan.rows)


def test_a_shared_reshard_that_moves_a_tensor_stands_behind_the_call_that_made_it() -> None:
    shared_reshard = PlanRow(
        "a/reshard", "shared_reshard", "first", "shared_reshard", ("replicated",) * 2, "I I", 0.001, (ALL_REDUCE,)
    )
    lines = plan_table(_plan(_call("a", "first"), _call("b", "second"), shared_reshard)).splitlines()
    order = [
        next(i for i, line in enumerate(lines) if word in line) for word in ("linear", "(shared reshard)", "second")
    ]
    assert order == sorted(order)


def test_parameters_of_a_module_without_a_line_are_shown_where_the_module_runs() -> None:
    table = plan_table(
        _plan(
            _parameter("norm.weight", "I I"),
            _call("up", "up"),
            _call("mul", "norm", "mul"),
            _call("head", "head"),
        )
    )
    assert _line(table, "(parameters)") == "norm (parameters) whole 1"
    order = [table.index(word) for word in ("up ", "norm ", "head ")]
    assert order == sorted(order)


def test_parameters_stored_differently_are_named() -> None:
    table = plan_table(
        _plan(_parameter("up.weight", "I S(0)"), _parameter("up.bias", "I I"), _call("up", "up", "linear"))
    )
    assert "weight dim 0 on tp" in table
    assert "bias whole" in table


def test_traffic_is_a_table_of_collectives_by_axis() -> None:
    rows = (
        _call("a", "a", transfers=(ALL_REDUCE, Moved("all_gather", "dp", 1000))),
        _call("b", "b", transfers=(Moved("all_reduce", "dp", 2000),)),
    )
    table = plan_table(_plan(*rows)).split("moved per step")[-1]
    assert _line(table, "all_gather") == "all_gather 1.00 kB - 1.00 kB"
    assert _line(table, "all_reduce") == "all_reduce 2.00 kB 4.00 MB 4.00 MB"
    assert re.search(r"total +3\.00 kB +4\.00 MB +4\.00 MB", table)


def test_joined_axes_that_bytes_move_over_have_a_column() -> None:
    plan = _plan(_call("a", "a", transfers=(ALL_REDUCE, Moved("all_reduce", "dp_tp", 1000))))
    table = plan_table(plan).split("moved per step")[-1]
    assert re.search(r"^ +dp +tp +dp_tp +total", table)
    assert _line(table, "all_reduce") == "all_reduce - 4.00 MB 1.00 kB 4.00 MB"


def test_a_plan_that_moves_nothing_says_so() -> None:
    assert "no bytes are moved" in plan_table(_plan(_call("a", "a")))


def test_calls_without_a_rule_are_listed_with_their_shares_and_advice() -> None:
    found = (
        KeptWhole("mylib::scaled", "no rule", 2, "scaled", "layers.0", 0.5, 0.25, 4000, 0.125),
        KeptWhole("aten::fft", "complex numbers", 1, "fft", "", 0.1, 0.05, 1000),
    )
    table = plan_table(_plan(_call("a", "a"), kept_whole=found))
    listed, advice = table.split("because no rule fits them:")[1].split("Give it")
    assert _line(listed, "operation") == "operation calls first call FLOPs step bytes reason"
    assert _line(listed, "mylib::scaled") == "mylib::scaled 2 layers.0 12.5% 25.0% 4.00 kB no rule"
    assert _line(listed, "aten::fft") == "aten::fft 1 fft ? 5.0% 1.00 kB complex numbers"
    assert advice.startswith(' a rule by autopar.register_rule("mylib::scaled", …): docs/how-to/own-operations.md')


def test_notes_stand_at_the_end() -> None:
    assert plan_table(_plan(_call("a", "a"), notes=("dropout is off",))).endswith("note: dropout is off")


def test_long_paths_and_many_transfers_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "base_model.model.language_model.transformer.decoder.blocks.0.feed_forward.gate_projection"
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    transfers = tuple(Moved(name, axis, 123_456_789) for name in collectives for axis in ("dp", "tp"))
    rows = (
        _parameter(f"{path}.weight", "S(0) S(1)"),
        _call("a", path, "scaled_dot_product_attention", ("replicated",) * 2, transfers),
    )
    for width in (80, 100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        table = plan_table(_plan(*rows, notes=("word " * 60,), kept_whole=(_WORDY,)))
        assert max(map(len, table.splitlines())) <= width
        # Nothing of the transfers is lost, and what is left of the module says which one it is.
        assert table.count("123.46 MB") >= len(transfers) and "jection" in table
    assert " ….blocks.0.feed_forward.gate_projection " in f" {table}".replace("\n", " ")


def test_without_a_terminal_a_table_has_120_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    rows = tuple(_call(f"a{n}", f"{'block' * 12}{n}", "operation" * 9, transfers=(ALL_REDUCE,)) for n in range(3))
    assert max(map(len, plan_table(_plan(*rows)).splitlines())) == 120


def test_rows_that_the_user_pinned_are_marked_and_explained() -> None:
    rows = [_call(f"up{layer}", f"layers.{layer}.up") for layer in range(4)]
    rows[2] = replace(rows[2], pinned=True)
    table = plan_table(_plan(*rows))
    assert _line(table, "layers.2.up").startswith("layers.2.up linear * data column 1")
    assert _line(table, "layers.0-1,3.up").startswith("layers.0-1,3.up linear data column 3")
    assert "\n*: pinned by an annotation" in table and "pinned" not in plan_table(_plan(*rows[:2]))


def test_the_legend_explains_the_words_that_occur() -> None:
    rows = (_call("a", "a", roles=("data", "a")), _call("b", "b", roles=("sequence", "partial")))
    table = plan_table(_plan(*rows))
    assert _line(table, "dim 2") == "a linear data dim 2 1 1.00 ms"
    for line in ("data: the axis splits samples", "dim: the axis splits that dim of the output", "sequence: the axis"):
        assert f"\n{line}" in table
    assert "column:" not in table and "expert:" not in table


WORKLOAD = Workload(
    model="Llama",
    num_parameters=8_030_000_000,
    inputs={"ids": "int64[8, 4096]"},
    microbatches=1,
    samples=8,
    tokens=32768,
    parameters="float32",
    compute="bfloat16",
    optimizer="adamw, float32 master copies",
    seconds=0.002,
    flops=1e9,
    ideal_seconds=0.004,
    one_device=OneDevice(0.01, 90_000_000_000, 80_000_000_000),
)


def test_the_header_says_what_was_planned_and_how_fast_it_is() -> None:
    plan = replace(_plan(_call("a", "head"), _call("b", "b")), workload=WORKLOAD)
    table = re.sub(r"\s+", " ", plan_table(plan))
    for words in (
        "model Llama, 8.03 B parameters in float32, computed in bfloat16",
        "inputs ids int64[8, 4096]",
        "optimizer adamw, float32 master copies",
        "speed 16,384,000 tokens/s; MFU 25.00% of the peak of cpu in bfloat16 (model FLOPs",
        "no recomputation)",
        "one device does not fit: needs 90.00 GB of 80.00 GB without recomputation",
    ):
        assert words in table
    one = replace(WORKLOAD, one_device=OneDevice(0.01, 7_000_000, 80_000_000), tokens=None, microbatches=2)
    table = re.sub(r"\s+", " ", plan_table(replace(plan, workload=one)))
    assert "one device 10.00 ms without communication, 5 times this step; 7.00 MB" in table
    assert "4,000 samples/s" in table and "2 micro-batches of ids" in table
    fast = replace(one, seconds=one.seconds / 25)
    assert " 100,000 samples/s" in plan_table(replace(plan, workload=fast))


def test_a_profile_of_another_device_is_told() -> None:
    plan = replace(_plan(_call("a", "head")), mesh=replace(MESH, hardware="h100"))
    for device, told in (("cpu", True), ("NVIDIA A100-SXM4-80GB", True), ("NVIDIA H100 80GB HBM3", False), ("", False)):
        table = plan_table(replace(plan, workload=replace(WORKLOAD, device=device)))
        assert ("profile" in table) == told
        assert not told or f"h100, of another device than the one of this run, {device}: " in table


def test_launches_that_devices_wait_for_have_a_line_before_the_total() -> None:
    plan = _plan(_call("a", "head"))
    slower = replace(plan, seconds=plan.seconds + 0.002, host_seconds=0.002)
    before, total = plan_table(slower).split("(launches)")[1].split("total")
    assert "+2.00 ms" in before and "3.00 ms" in total
    assert "(launches)" not in plan_table(plan)


def test_printing_a_plan_prints_its_table() -> None:
    plan = _deep_plan(2)
    assert str(plan) == plan_table(plan)
