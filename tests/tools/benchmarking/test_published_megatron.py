"""Megatron-LM's golden values and BLOOM's log: rows, what is not expressed, and whose bytes are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.costs.hardware.load import load
from autopar.planning.pipeline.planner import plan_pipeline
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.schedules.schedule import Schedule
from benchmarks import published
from benchmarks.publications import planning
from benchmarks.publications.accuracy import pairs_in_order
from benchmarks.publications.depths import Depths
from benchmarks.publications.megatron import (
    MegatronBytes,
    allocated_bytes,
    by_both_conventions,
    copied_bytes,
    device_bytes,
    gradient_bytes,
    module_bytes,
    parameters_of,
    runs_out,
)
from benchmarks.publications.planning import Predicted, RankBytes
from benchmarks.publications.prediction import Outcome
from benchmarks.publications.rows import Row, Shape
from benchmarks.publications.strategies import cuts, pinned
from benchmarks.publications.tables import read_table
from tests.support.published_rows import LLAMA, row

HEADER = (
    "family,case,golden,environment,gpu_type,test_type,layers,hidden,ffn,heads,kv_heads,vocabulary,tokenizer,"
    "vocab_divisor,sequence,tied,norm,gated,position,hidden_dropout,qk_layernorm,multi_latent,attention_variant,"
    "mtp_layers,experts,tp,pp,vpp,cp,ep,dp,micro_batch,global_batch,distributed_optimizer,optimizer_instances,fsdp,"
    "optimizer,recompute,precision,attention_backend,implementation,sequence_parallel,cuda_graphs,uneven,steps,"
    "static_bytes,peak_bytes,iteration_seconds,kv_channels"
)
CELLS = (
    "gpt,a case,dev_dgx_a100,dev,a100,regular,12,512,2048,8,8,,GPT2BPETokenizer,128,1024,1,LayerNorm,0,learned,0.1,0,0,"
    ",0,0,2,2,3,1,1,2,4,32,1,1,,adam,none,bf16,unfused,transformer_engine,1,,,100,1000,3000,0.5,"
)
GOLDEN = dict(zip(HEADER.split(","), CELLS.split(","), strict=True))
BLOOM = (
    "line,section,date,nodes,gpus,gpu_type,size_B,layers,hidden,ffn,heads,vocabulary,sequence,dp,tp,pp,micro_batch,"
    "global_batch,accumulation,zero,precision,gradients,partition,stage_layers,recompute,step_seconds,memory_GB,status\n"
    "7,a,02-20,48,384,a100_80gb,200,80,14400,57600,96,250880,2048,4,8,10,2,2048,256,1,fp16,16,uniform,"
    '"8 8 8 8 8 8 8 8 8 8",full,208.5,43,Success\n'
    "8,a,02-20,48,384,a100_80gb,200,80,14400,57600,96,250880,2048,4,8,10,8,2048,64,1,fp16,16,uniform,"
    '"8 8 8 8 8 8 8 8 8 8",full,,,OOM\n'
)


def _read(folder: Path, text: str) -> tuple[Row, ...]:
    path = folder / "table.csv"
    path.write_text(text)
    return read_table(path)


def _golden(folder: Path, **changes: str) -> Row:
    cells = {**GOLDEN, **changes}
    (found,) = _read(folder, f"{','.join(cells)}\n{','.join(cells.values())}\n")
    return found


def _told(requested: Row, *ranks: RankBytes) -> Outcome:
    return Outcome(requested, Predicted(1.0, 0.0, ranks, True))


def test_a_golden_row_has_its_degrees_model_and_bytes(tmp_path: Path) -> None:
    found = _golden(tmp_path)
    assert (found.tp, found.pp, found.chunks, found.dp, found.accumulation, found.zero) == (2, 2, 3, 2, 4, 1)
    assert (found.schedule, found.sequence_parallel, found.precision) == ("interleaved_1f1b", True, "bf16-mixed")
    assert found.shape == Shape("gpt", 12, 512, 8, 8, 2048, 50432, tied=True, flash=False, dropout=0.1)
    assert (found.allocated_bytes, found.peak_bytes, found.seconds) == (1000, 3000, None)
    assert cuts(found) == (2,) * 6


def test_the_vocabulary_is_padded_for_the_ranks_that_divide_it(tmp_path: Path) -> None:
    assert _golden(tmp_path, tp="1").shape.vocabulary == 50304
    assert _golden(tmp_path, vocabulary="1000", vocab_divisor="", tp="4").shape.vocabulary == 1024


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({"attention_backend": "flash"}, True),
        ({"attention_backend": "auto"}, True),
        ({"attention_backend": "auto", "implementation": "local"}, False),
        ({"attention_backend": "auto", "environment": "lts", "golden": "lts"}, True),
        ({"attention_backend": "auto", "environment": "lts", "golden": "lts_dgxa100_dracooci"}, False),
        ({"attention_backend": "auto", "environment": "lts", "golden": "lts_dgx_a100", "steps": "21"}, False),
    ],
)
def test_attention_is_as_the_container_has_it(tmp_path: Path, changes: dict[str, str], fused: bool) -> None:
    assert _golden(tmp_path, **changes).shape.flash is fused


def test_models_with_gates_are_llamas_and_large_ones_have_seconds(tmp_path: Path) -> None:
    specified = {"gated": "1", "norm": "RMSNorm", "position": "rope", "hidden": "4096", "heads": "32", "kv_heads": "8"}
    found = _golden(tmp_path, tokenizer="Llama2Tokenizer", tp="1", vpp="", cp="", **specified)
    assert (found.shape.kind, found.shape.kv_heads, found.shape.vocabulary) == ("llama", 8, 32000)
    assert (found.seconds, found.chunks, found.schedule) == (0.5, 1, "1f1b")
    assert [each.seconds for each in by_both_conventions([found])] == [0.5, None]


@pytest.mark.parametrize(
    ("uneven", "counts"),
    [
        ("", (3, 3, 3, 3)),
        ("decoder-first-pipeline-num-layers=2 decoder-last-pipeline-num-layers=2", (2, 4, 4, 2)),
    ],
)
def test_uneven_stages_are_as_they_were_stated(tmp_path: Path, uneven: str, counts: tuple[int, ...]) -> None:
    assert cuts(_golden(tmp_path, uneven=uneven, pp="4", vpp="1")) == counts


def test_stages_that_count_embedding_and_loss_have_a_layer_less(tmp_path: Path) -> None:
    specified = "account-for-embedding-in-pipeline-split=True account-for-loss-in-pipeline-split=True"
    assert cuts(_golden(tmp_path, uneven=specified, pp="4", vpp="2", layers="6")) == (0, *(1,) * 6, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "t5"}, "a model of the family t5"),
        ({"family": "moe", "experts": "8"}, "a model of the family moe"),
        ({"multi_latent": "1"}, "latent attention"),
        ({"mtp_layers": "1"}, "layers that predict several tokens"),
        ({"attention_variant": "linear"}, "another attention"),
        ({"fsdp": "optim"}, "Megatron-FSDP"),
        ({"optimizer_instances": "2"}, "an optimizer that is divided over a part"),
        ({"test_type": "frozen-resume"}, "frozen parameters"),
        ({"optimizer": "muon"}, "the optimizer muon"),
        ({"precision": "fp8"}, "products in fp8"),
        ({"tokenizer": "Unheard"}, "the tokenizer Unheard"),
        ({"gated": "1"}, "LayerNorm beside an MLP that is gated"),
        ({"position": "relative"}, "positions that are relative"),
        ({"kv_channels": "128"}, "heads that are not as large together"),
        ({"cuda_graphs": "full"}, "CUDA graphs"),
        ({"case": "defer_embedding_wgrad_compute"}, "gradients of the embedding that wait"),
    ],
)
def test_what_is_not_expressed_is_listed_with_its_reason(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    found = _golden(tmp_path, **changes)
    assert found.unexpressed is not None and found.unexpressed.startswith(reason)


def test_golden_rows_are_planned_by_two_conventions_and_others_once(tmp_path: Path) -> None:
    golden, other = _golden(tmp_path), row()
    assert [(each.source, each.conventions) for each in by_both_conventions([golden, other])] == [
        ("megatron golden", "autopar"),
        ("nanotron", "autopar"),
        ("megatron golden", "megatron"),
    ]
    assert pinned(golden).conventions == "autopar"


def test_a_golden_prediction_is_of_the_last_rank_with_workspaces(tmp_path: Path) -> None:
    golden = _golden(tmp_path)
    ranks = RankBytes(900, 800), RankBytes(500, 300, inputs=60)
    own, megatron = (
        allocated_bytes(_told(replace(golden, conventions=name), *ranks)) for name in ("autopar", "megatron")
    )
    assert own == MegatronBytes(300, 500, load("a100").workspace_bytes)
    assert megatron == MegatronBytes(300 - 60 + 4 * 2**20, 500 + 4 * 2**20, 2 * 32 * 2**20)


def test_gradients_in_half_precision_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    golden = _golden(tmp_path, precision="fp16")
    matrices = 6 * golden.shape.layer_parameters + golden.shape.vocabulary * 512
    assert parameters_of(golden, 1) == parameters_of(golden, 0) == matrices / 2
    assert gradient_bytes(golden, 1) == -2 * matrices / 2
    assert copied_bytes(golden, 1) == 4 * matrices / 2 / 2 == copied_bytes(replace(golden, zero=0), 1) / 2
    assert gradient_bytes(_golden(tmp_path), 1) == copied_bytes(_golden(tmp_path), 1) == 0
    alone = replace(golden, pp=1, chunks=1, framework="megatron-deepspeed")
    assert gradient_bytes(alone, 0) == -2 * (12 * golden.shape.layer_parameters + golden.shape.vocabulary * 512) / 2


def test_megatrons_own_attention_has_a_buffer_of_scores_and_the_engine_a_workspace(tmp_path: Path) -> None:
    assert module_bytes(_golden(tmp_path)) == 4 * 2**20
    assert module_bytes(_golden(tmp_path, gpu_type="h100")) == 32 * 2**20
    assert module_bytes(_golden(tmp_path, implementation="local")) == 2 * 4 * (8 // 2) * 1024**2


def test_a_row_of_blooms_log_has_its_stages_seconds_and_device(tmp_path: Path) -> None:
    fits, fails = _read(tmp_path, BLOOM)
    assert (fits.dp, fits.tp, fits.pp, fits.zero, fits.recompute) == (4, 8, 10, 1, "full")
    assert (fits.seconds, fits.device_bytes, fits.precision) == (208.5, 43e9, "fp16-mixed")
    assert cuts(fits) == (8,) * 10 and fits.shape.vocabulary == 250880 and fits.shape.tied
    assert fails.out_of_memory and fails.seconds is fails.device_bytes is None


def test_a_device_of_bloom_holds_its_fullest_rank_and_what_is_no_tensor(tmp_path: Path) -> None:
    fits, _ = _read(tmp_path, BLOOM)
    a100, fullest = load("a100"), RankBytes(50 * 10**9, 40 * 10**9)
    found = _told(fits, fullest, *(RankBytes(10, 10),) * 9)
    tensors = 50 * 10**9 + gradient_bytes(fits, 0)
    fixed = a100.context_bytes + 4 * a100.communicator_bytes + a100.workspace_bytes
    assert device_bytes(found) == pytest.approx(a100.allocator_factor * tensors + fixed)
    assert not runs_out(found) and runs_out(_told(fits, RankBytes(90 * 10**9, 1)))


def test_ranks_of_several_stages_hold_what_a_pipelines_plan_says() -> None:
    """The maxima of stages are not added up: what only the running stage holds is there once."""
    shape = replace(LLAMA, layers=4)
    requested = pinned(row(shape=shape, pp=2, chunks=2, accumulation=4, schedule="interleaved_1f1b"))
    wanted = planning.request_of(requested, load("h100"))
    starts = tuple(f"layers.{start}" for start in (1, 2, 3))
    wanted = replace(wanted, pipeline=replace(wanted.pipeline, split_points=starts))
    schedule = Schedule("interleaved_1f1b", 2, 4, 2)
    program = planning.captured(shape, requested.sequence, requested.batch, requested.precision)
    request = PipelineRequest.of(wanted, program, requested.mesh("h100"), "pp", schedule)
    plan = plan_pipeline(request)
    ranks = planning._bytes([Depths(each.plan) for each in plan.stages], schedule, planning._runs(request))
    assert [rank.peak for rank in ranks] == [plan.rank_bytes(0), plan.rank_bytes(1)]
    maxima = [sum(plan.stages[stage].plan.peak_bytes for stage in schedule.stages_of(rank)) for rank in (0, 1)]
    assert all(rank.peak < most for rank, most in zip(ranks, maxima, strict=True))
    assert all(0 < rank.inputs < rank.standing < rank.peak for rank in ranks)


def test_pairs_are_counted_that_differ_by_more_than_a_share() -> None:
    assert pairs_in_order([1.0, 3.0, 2.0], [1.0, 1.05, 3.0], 0.1) == (1, 2)


def test_the_command_prints_both_conventions_and_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made_up(requested: Any, *_: object) -> Predicted:
        size = requested.batch * 10**8 * (2 if requested.conventions == "autopar" else 1)
        return Predicted(200.0, 0.0, (RankBytes(size, size // 3),) * requested.pipeline, True)

    monkeypatch.setattr("benchmarks.publications.prediction.predicted", made_up)
    cells = [GOLDEN, {**GOLDEN, "micro_batch": "2", "peak_bytes": "1500"}, {**GOLDEN, "family": "t5"}]
    golden, bloom = tmp_path / "golden.csv", tmp_path / "bloom.csv"
    golden.write_text("\n".join([HEADER, *(",".join(each.values()) for each in cells), ""]))
    bloom.write_text(BLOOM)
    published.main([str(golden), str(bloom), "--store", str(tmp_path / "store")])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    of_golden = [line for line in lines if line.startswith(("autopar at", "megatron at", "autopar b", "megatron b"))]
    assert len(of_golden) == 4 and all("1 of 1 (100.0%)" in line for line in of_golden if "peak" in line)
    assert any(line.startswith("BLOOM, fits told right: ") and "of 2 runs" in line for line in lines)
    assert "megatron golden 1 a model of the family t5, which the benchmark does not build" in lines
