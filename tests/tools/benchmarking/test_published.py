"""Rows of tables become plans pinned to their strategies; few layers stand for all; memory is that of frameworks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.costs.timeline.values import COMPUTE, Task
from autopar.errors import InputError
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate
from benchmarks import published
from benchmarks.publications import prediction
from benchmarks.publications.kernels import causal_softmax, rms_norm, rotary
from benchmarks.publications.memory import (
    CAPACITY,
    LIBRARY_BYTES,
    allocated,
    at_the_peak,
    factors,
    flat_bytes,
    fragmentation,
    framework_bytes,
    further_bytes,
    hosts_are_ahead,
    layer_seconds,
    runs_out,
)
from benchmarks.publications.parts import is_of_parts, parts
from benchmarks.publications.planning import Predicted, RankBytes, predicted, waited
from benchmarks.publications.prediction import outcomes
from benchmarks.publications.repeated import NotRepeated, extended
from benchmarks.publications.rows import GIB, Shape
from benchmarks.publications.strategies import Unexpressed, by_cost, cuts, less_at_the_ends, pinned
from benchmarks.publications.tables import read_table
from tests.support.published_rows import LARGE, LLAMA, outcome, row

NANOTRON = (
    "run,gpus,dp,tp,pp,zero_stage,micro_batch,accumulation,global_batch,sequence,layers,hidden,heads,kv_heads,ffn,"
    "vocabulary,tied,status,tokens_per_s_per_gpu,step_seconds,allocated_GB,reserved_GB,all_reduce_GBps,"
    "all_gather_GBps,reduce_scatter_GBps,intra_all_reduce_GBps,intra_all_gather_GBps,intra_reduce_scatter_GBps\n"
    "small,4,2,2,1,1,2,3,12,128,3,64,4,,128,256,True,Success,1000,0.5,1.5,2.0,400,200,200,,,\n"
    "large,4,1,1,4,0,2,2,4,128,4,64,4,4,128,256,False,OOM,,,,,,,,,,\n"
)
PAPERS = (
    "source,table,model,params_B,layers,hidden,heads,kv_heads,ffn,vocab,seq,global_batch,micro_batch,gpus,gpu_type,tp,"
    "pp,vpp,dp,cp,ep,sp,recompute,precision,measured_tflops_per_gpu,step_seconds,mfu,memory_GB,notes\n"
    "llm-foundry,A100,MPT-1b,1,2,64,4,4,256,512,128,16,2,4,a100_80gb,1,1,1,4,1,1,no,full,amp_bf16,,0.25,,,"
    "FSDP FULL_SHARD\n"
    "llm-foundry,H100,MPT-1b,1,2,64,4,4,256,512,128,16,2,4,h100_80gb,1,1,1,4,1,1,no,full,amp_fp8,,0.25,,,\n"
    "arXiv:2401.10241,Table 4,GPT,1,6,64,4,4,256,,128,64,2,4,A100-80GB,1,4,1,1,1,1,no,none,fp16,,0.25,,,"
    "schedule ZB-1p; 32 micro-batches\n"
    "arXiv:2401.10241,Table 4,GPT,1,6,64,4,4,256,,128,64,2,4,A100-80GB,1,4,1,1,1,1,no,none,fp16,,0.25,,,"
    "schedule ZB-2p; 32 micro-batches\n"
    "arXiv:2504.14960,Table 3,MoE,1,6,64,4,4,256,,128,64,,4,H100-80GB,1,4,1,1,1,1,no,none,bf16,,,0.3,,64 experts\n"
)
VTRAIN = (
    "model,params_B,layers,hidden,heads,ffn,seq,global_batch,micro_batch,gpus,gpu_type,tp,pp,dp,recompute,precision,"
    "step_seconds\nGPT,0.3,4,64,4,256,128,16,2,8,A100,2,2,2,full,fp16,0.14\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


# Reading.


def test_a_run_of_nanotron_has_its_degrees_bytes_and_bandwidths(tmp_path: Path) -> None:
    small, large = read_table(written(tmp_path, NANOTRON))
    assert (small.dp, small.tp, small.pp, small.zero, small.accumulation, small.global_batch) == (2, 2, 1, 1, 3, 12)
    assert small.shape == Shape("llama", 3, 64, 4, 4, 128, 256, tied=True)
    assert small.reserved_bytes == 2 * GIB and small.allocated_bytes == 1.5 * GIB
    assert small.bandwidths == {"all_reduce": 4e11, "all_gather": 2e11, "reduce_scatter": 2e11}
    assert large.out_of_memory and large.seconds is None and large.bandwidths == {}


def test_with_fewer_micro_batches_than_stages_1f1b_is_gpipe(tmp_path: Path) -> None:
    _, large = read_table(written(tmp_path, NANOTRON))
    assert large.accumulation < large.pp and large.schedule == "gpipe"


def test_megatron_of_vtrain_writes_out_scores_and_computes_again(tmp_path: Path) -> None:
    (only,) = read_table(written(tmp_path, VTRAIN))
    assert only.source == "vtrain one node" and not only.shape.flash
    assert (only.accumulation, only.recompute, only.precision, only.schedule) == (4, "full", "fp16-mixed", "1f1b")


def test_rows_of_papers_say_their_sharding_and_schedule_in_notes(tmp_path: Path) -> None:
    mpt, _, zero_bubble, _, _ = read_table(written(tmp_path, PAPERS))
    assert (mpt.source, mpt.zero, mpt.shape.kind, mpt.accumulation) == ("llm-foundry", 3, "mpt", 2)
    assert (zero_bubble.schedule, zero_bubble.chunks) == ("interleaved_zero_bubble", 1)
    assert zero_bubble.shape.vocabulary == 51200


def test_a_table_of_other_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has the columns a, b; give a table with .*accumulation"):
        read_table(written(tmp_path, "a,b\n1,2\n"))


# Strategies.


def test_zero_is_a_preset_alone_and_storage_next_to_tensor_parallelism() -> None:
    assert pinned(row(dp=4, zero=1)).strategy == "zero1"
    other = pinned(row(dp=4, tp=2, zero=1))
    assert other.strategy == "megatron_regather" and other.annotations[0].storage == ("dp",)
    assert pinned(row(dp=1, tp=2, zero=1)).annotations == ()
    assert pinned(row(tp=2, sequence_parallel=False)).strategy == "megatron"


def test_steps_of_more_micro_batches_share_a_plan_where_there_is_no_pipeline() -> None:
    assert pinned(row(accumulation=8)) == pinned(row(accumulation=2)) != pinned(row(accumulation=1))
    assert pinned(row(pp=2, accumulation=8)) != pinned(row(pp=2, accumulation=4))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unexpressed": "a reason of its source"}, "a reason of its source"),
        ({"device": "gb300"}, "no profile of the device gb300"),
        ({"precision": "fp4"}, "no precision that is fp4"),
        ({"cp": 2, "tp": 2}, "no preset for context parallelism beside tensor parallelism or a pipeline"),
        ({"cp": 2}, "context parallelism of these models is not pinned"),
        ({"tp": 8}, "heads of attention that do not divide over tp"),
        ({"pp": 8}, "more stages than layers"),
    ],
)
def test_what_is_not_expressed_has_a_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Unexpressed, match=reason):
        pinned(row(**changes))


def test_rows_without_a_plan_say_why(tmp_path: Path) -> None:
    rows = read_table(written(tmp_path, PAPERS))
    (found,) = outcomes(rows[1:2], lambda _: pytest.fail("planned"))
    assert found.predicted is None and "FP8" in found.reason
    reasons = [each.unexpressed for each in rows]
    assert [reason and reason.split(",")[0] for reason in reasons] == [
        None,
        "products in FP8 or FP4",
        None,
        "the schedule ZB-2p",
        "experts or latent attention",
    ]


def test_nanotron_shards_out_layers_by_cost_and_the_head_counts() -> None:
    llama = Shape("llama", 16, 2048, 32, 32, 8192, 131072, tied=True)
    assert by_cost(llama, 2) == (10, 6)  # the head costs four layers
    assert sum(by_cost(llama, 4)) == 16
    with pytest.raises(Unexpressed, match="that has no layer"):
        cuts(row(shape=dataclasses.replace(llama, layers=4), pp=4))


def test_zero_bubble_has_a_layer_less_at_the_ends() -> None:
    assert less_at_the_ends(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)
    with pytest.raises(Unexpressed, match="do not divide over stages"):
        less_at_the_ends(23, 8)


def test_megatron_shards_out_equal_layers() -> None:
    assert cuts(row(framework="megatron", pp=5)) == (1, 1, 1, 1, 1)
    with pytest.raises(Unexpressed, match="do not divide over stages"):
        cuts(row(framework="megatron", pp=2))


# Kernels.


def test_the_rules_of_fused_kernels_are_right_on_ranks() -> None:
    x, weight = torch.randn(2, 4, 6).double(), torch.randn(6).double()
    heads, angles = torch.randn(2, 2, 4, 6).double(), (torch.randn(4, 6).double(), torch.randn(4, 6).double())
    assert len(autopar.check_rule("published::rms_norm", x, weight)) >= 3
    assert len(autopar.check_rule("published::rotary", heads, *angles)) >= 4
    assert len(autopar.check_rule("published::causal_softmax", torch.randn(2, 2, 4, 4).double(), 0.5)) >= 3


def test_fused_kernels_have_the_gradients_of_what_they_compute() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight), atol=1e-4)
    heads = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    half = torch.randn(3, 2, dtype=torch.float64)  # both halves of the features turn by the same angles
    assert torch.autograd.gradcheck(rotary, (heads, half.cos().repeat(1, 2), half.sin().repeat(1, 2)))
    scores = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: causal_softmax(given, 0.7), scores)


# Few layers for all.


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"dp": 2, "zero": 1}, (5,)),
        ({"dp": 2, "tp": 2}, (5,)),
        pytest.param({"dp": 2, "zero": 3, "accumulation": 1}, (6,), marks=pytest.mark.slow),
        ({"dp": 2, "pp": 2, "recompute": "full"}, (3, 2)),
    ],
)
def test_few_layers_say_what_all_of_them_say(changes: dict[str, object], layers: tuple[int, ...]) -> None:
    requested, hardware = pinned(row(shape=dataclasses.replace(LARGE, layers=sum(layers)), **changes)), load("h100")
    few, all_of_them = (predicted(requested, layers, hardware, whole) for whole in (False, True))
    assert few.derived and not all_of_them.derived
    # What the stages of a pipeline do once a step is a sum, of messages that join layers in ways of their own.
    tolerance = 0.01 if "pp" in changes else 1e-9
    assert few.first_seconds == pytest.approx(all_of_them.first_seconds, rel=tolerance)
    assert few.further_seconds == pytest.approx(all_of_them.further_seconds, rel=1e-9)
    assert few.peak_bytes == pytest.approx(all_of_them.peak_bytes, rel=1e-9)
    assert few.standing_bytes == pytest.approx(all_of_them.standing_bytes, rel=1e-9)


def test_tasks_of_a_layer_are_put_in_and_wait_for_their_own() -> None:
    def tasks(*names: str) -> list[Task]:
        return [Task(name, COMPUTE, 1.0, after=(n - 1,) if n else ()) for n, name in enumerate(names)]

    found = extended(tasks("in", "layer", "out"), tasks("in", "layer", "layer", "out"), 2)
    assert [each.name for each in found] == ["in", "layer", "layer", "layer", "layer", "out"]
    assert [each.after for each in found] == [(), (0,), (1,), (2,), (3,), (4,)]


def test_a_task_that_stands_for_all_layers_grows_with_them() -> None:
    short = [Task("layer", COMPUTE, 1.0), Task("norms", COMPUTE, 3.0)]
    long = [Task("layer", COMPUTE, 1.0), Task("layer", COMPUTE, 1.0), Task("norms", COMPUTE, 5.0)]
    assert [each.seconds for each in extended(short, long, 2)] == [1.0, 1.0, 1.0, 1.0, 9.0]


def test_plans_that_are_not_a_layer_apart_are_refused() -> None:
    with pytest.raises(NotRepeated, match="forward: 2 and 3 tasks"):
        extended(
            [Task("a", COMPUTE, 1.0), Task("b", COMPUTE, 1.0)],
            [Task("b", COMPUTE, 1.0), Task("b", COMPUTE, 1.0), Task("a", COMPUTE, 1.0)],
            1,
        )


def test_a_message_that_would_take_less_than_nothing_is_of_no_repeated_layer() -> None:
    short = [Task("layer", COMPUTE, 1.0), Task("gathered", COMPUTE, 3.0)]
    long = [Task("layer", COMPUTE, 1.0), Task("layer", COMPUTE, 1.0), Task("gathered", COMPUTE, 2.0)]
    assert [each.seconds for each in extended(short, long, 2)][-1] == 0.0
    with pytest.raises(NotRepeated, match=r"gathered takes 3.0 s, and 2.0 s with a layer more"):
        extended(short, long, 3)


# Predictions.


def test_what_was_planned_is_kept_until_a_number_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Hardware] = []

    def counting(requested: object, counts: object, hardware: Hardware, whole: bool) -> Predicted:
        planned.append(hardware)
        return Predicted(1.0, 0.5, (RankBytes(10, 5),), True)

    monkeypatch.setattr(prediction, "predicted", counting)
    h100 = load("h100")
    for accumulation in (2, 3):  # the same plan
        (found,) = outcomes([row(accumulation=accumulation)], lambda _: h100, store=tmp_path)
        assert found.seconds == 1.0 + 0.5 * (accumulation - 1)
    assert len(planned) == 1
    slower = dataclasses.replace(h100, op_latency_s=1e-3)
    outcomes([row()], lambda _: slower, store=tmp_path)
    outcomes([row(dp=2)], lambda _: h100, store=tmp_path)
    assert len(planned) == 3


def test_what_the_planner_refuses_is_a_reason() -> None:
    odd = row(shape=dataclasses.replace(LLAMA, vocabulary=250), dp=2, tp=4, sequence=130)
    (found,) = outcomes([odd], lambda _: load("h100"))
    assert found.predicted is None and found.reason.startswith("StrategyError: megatron_regather")


def test_nanotron_keeps_buckets_flat_parameters_and_buffers_of_whole_activations() -> None:
    libraries = framework_bytes(row(dp=1), 10.0)
    assert libraries == LIBRARY_BYTES
    assert framework_bytes(row(dp=2), 10.0) - libraries == 2 * 10
    assert framework_bytes(row(dp=2, framework="megatron"), 10.0) == 0
    given = row(tp=2)
    whole = given.micro_batch * given.sequence * LLAMA.hidden * 2
    assert framework_bytes(given, 10.0) - libraries == 2 * whole
    assert flat_bytes(row(dp=2, zero=1), 10.0) == 2 * (10 + 5) and flat_bytes(row(dp=2), 10.0) == 0


def test_what_reduce_scatters_take_waits_for_the_device_while_hosts_are_ahead_of_it() -> None:
    given = row(tp=2, micro_batch=1)
    whole = given.sequence * LLAMA.hidden * 2
    logits = given.sequence * LLAMA.vocabulary // 2
    assert further_bytes(given, 10.0) == (2 * LLAMA.layers + 1) * whole + 2 * logits
    late = {"tp": 2, "micro_batch": 1, "bandwidths": {"intra_all_reduce": 4e11}}
    assert further_bytes(row(**late), 10.0) == 2 * logits, "of the last two forwards nothing waits"
    staged = row(**late, shape=dataclasses.replace(LLAMA, layers=16), pp=4, accumulation=8)
    assert further_bytes(staged, 10.0) == (2 * cuts(staged)[0] + 1) * 2 * whole, "of two of four"


def test_hosts_are_ahead_where_a_layer_computes_longer_than_they_are_late() -> None:
    late = {"tp": 2, "shape": LARGE, "sequence": 4096, "bandwidths": {"intra_all_reduce": 4e11}}
    h100 = load("h100")
    products = 2 * 4096 * LARGE.layer_parameters / 2 / (h100.flops["bfloat16"] * h100.product_efficiency)
    assert products < layer_seconds(row(**late, micro_batch=1)) < 2 * products
    assert hosts_are_ahead(row(**late, micro_batch=8)) and not hosts_are_ahead(row(**{**late, "tp": 8}, micro_batch=8))
    assert hosts_are_ahead(row(**{**late, "bandwidths": {}}, micro_batch=1))


def test_nanotron_copies_samples_and_keeps_the_gradients_of_one_micro_batch() -> None:
    given = row(micro_batch=2)
    assert further_bytes(given, 10.0) == LLAMA.layers * 2 * given.sequence * LLAMA.hidden * 2
    assert further_bytes(row(micro_batch=1, accumulation=1), 10.0) == 4 * 10
    assert further_bytes(row(framework="megatron", accumulation=1), 10.0) == 0


def test_flat_parameters_of_zero_stand_between_steps_and_not_at_the_peak() -> None:
    for zero in (0, 1):
        given = outcome(1.0, 1e9, dp=2, zero=zero)
        further = further_bytes(given.row, LLAMA.parameters)
        assert at_the_peak(given) == 1e9 + 2 * LLAMA.parameters + LIBRARY_BYTES + further
        assert allocated(given) == 5e8 + (2 + 3 * zero) * LLAMA.parameters + LIBRARY_BYTES


def test_a_stage_of_nanotron_has_no_buffers_between_steps_either() -> None:
    assert allocated(outcome(1.0, 1e9, pp=2, accumulation=4)) == 5e8 + LIBRARY_BYTES


def test_a_step_runs_out_where_the_context_and_nccl_leave_no_room() -> None:
    capacity = CAPACITY["h100_80gb"]
    assert not runs_out(outcome(1.0, capacity - 2 * GIB))
    assert runs_out(outcome(1.0, capacity - GIB // 2))


def test_fragmentation_of_a_run_is_that_of_other_models() -> None:
    other = dataclasses.replace(LLAMA, layers=6)
    runs = [
        outcome(1.0, 100, reserved_bytes=taken, shape=shape, framework="megatron")
        for taken, shape in ((110.0, LLAMA), (130.0, other))
    ]
    assert factors(runs) == [1.3, 1.1] and fragmentation(runs) == pytest.approx(1.2)
    staged = outcome(
        1.0, 100, reserved_bytes=200.0, pp=2, framework="megatron", shape=dataclasses.replace(LLAMA, layers=4)
    )
    assert factors([*runs, staged]) == [1.3, 1.1, 2.0], "of runs on a pipeline it is another"
    assert fragmentation([outcome(1.0)]) == 1.0
    nearly = CAPACITY["h100_80gb"] - 2 * GIB
    assert runs_out(outcome(1.0, nearly), 1.1) and not runs_out(outcome(1.0, nearly))


# Messages.


def test_megatron_waits_for_the_messages_of_interleaved_stages_alone() -> None:
    interleaved = row(pp=2, chunks=2, schedule="interleaved_1f1b", framework="megatron", accumulation=4)
    assert pinned(interleaved).waits
    assert not pinned(dataclasses.replace(interleaved, framework="nanotron")).waits
    assert not pinned(dataclasses.replace(interleaved, schedule="interleaved_zero_bubble")).waits
    assert not pinned(row(pp=2, framework="megatron", accumulation=4)).waits


def test_a_wait_is_half_of_each_message_and_no_message_is_longer_on_its_way() -> None:
    stage = StageSeconds(1.0, 1.5, 0.5, 0.25, 0.5)
    held = waited(stage)
    assert (held.forward, held.backward_input, held.backward_weight) == (1.125, 1.75, 0.5)
    assert held.forward + held.send_forward == stage.forward + stage.send_forward
    schedule = Schedule("interleaved_1f1b", 2, 4, 2)
    assert simulate(schedule, [held] * 4).seconds > simulate(schedule, [stage] * 4).seconds


# The command.


@pytest.mark.slow
def test_parts_of_memory_stand_next_to_those_of_a_plan(tmp_path: Path) -> None:
    head = "source,figure,model,mode,quantity,value,unit,tp,pp,micro_batch,recompute,sequence_parallel\n"
    lines = "p,1,megatron-22B,none,parameters and optimizer,45.5625,GiB,,,,,\np,3,other,none,total,1,GB,,,,,\n"
    path = written(tmp_path, head + lines)
    assert is_of_parts(path)
    assert not is_of_parts(written(tmp_path, NANOTRON))
    stored, unknown = parts(written(tmp_path, head + lines), load("a100"))
    assert stored.predicted == pytest.approx(stored.measured, rel=0.01)
    assert unknown.predicted is None and "does not build" in unknown.reason


def test_a_table_is_whole_unless_a_number_of_rows_is_stated() -> None:
    assert published.table_and_count("a/b.csv:60") == ("a/b.csv", 60)
    assert published.table_and_count("a/b.csv") == ("a/b.csv", None)
    assert published.table_and_count("c:/b.csv") == ("c:/b.csv", None)


@pytest.mark.slow
def test_the_command_prints_errors_memory_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = NANOTRON.splitlines()[1].replace("small,4,2,2", "other,2,1,2")
    (tmp_path / "papers").mkdir()
    heading, *lines = PAPERS.splitlines()
    refused = "\n".join((heading, lines[1], lines[3], lines[4]))
    tables = [written(tmp_path, f"{NANOTRON}{second}\n"), written(tmp_path / "papers", f"{refused}\n")]
    plot = tmp_path / "plot.png"
    pytest.importorskip("matplotlib")
    published.main([*map(str, tables), "--rows", "--store", str(tmp_path / "store"), "--plot", str(plot)])
    printed = capsys.readouterr().out
    assert "nanotron pp = 1" in printed and "out of memory told right" in printed
    assert "the schedule ZB-2p, which PyTorch has not" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
