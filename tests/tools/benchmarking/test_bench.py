"""Strategies measured on real ranks and in a fake world, and everything that is refused or fails on the way."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.cli import main
from autopar.costs.hardware.load import PROFILES, load
from autopar.errors import AutoparError, InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.named import trainable
from autopar.models.plain import Perceptron
from autopar.runtime.ranks import launch
from autopar.runtime.ranks.launch import RankError, World, on_ranks
from autopar.tools.benchmarking import bench as bench_module
from autopar.tools.benchmarking import command as bench_command
from autopar.tools.benchmarking import runner as runner_module
from autopar.tools.benchmarking.bench import BenchResult, bench
from autopar.tools.benchmarking.dtensor_plans import tensor_parallel_plan
from autopar.tools.benchmarking.measurement import Measurement
from autopar.tools.benchmarking.runner import Cell, _first_steps, _in_turns, _same_programs, _tried, race
from autopar.tools.benchmarking.trainers import AUTO, PEERS, Terms, Trainer, contestant, strategy_names
from tests.support.ranks import Ranks

HIDDEN, BATCH = 16, 8
PERCEPTRON = "tests.tools.benchmarking.test_bench:perceptron"
TERMS = Terms(load("cpu"))


def perceptron() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model of so few parameters that all of its steps take milliseconds."""
    model = Perceptron(2, HIDDEN, HIDDEN)
    return model, (torch.randn(BATCH, HIDDEN), torch.randint(HIDDEN, (BATCH,)))


def broken() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a perceptron whose labels lie outside its classes, which is an error in its first step."""
    model, (features, labels) = perceptron()
    return model, (features, labels + HIDDEN)


def with_a_list() -> tuple[nn.Module, list[torch.Tensor]]:
    model, inputs = perceptron()
    return model, list(inputs)


@pytest.fixture(scope="module")
def measured() -> Mapping[str, Measurement]:
    """Some strategies on two ranks, by name."""
    strategies = (AUTO, "data_parallel", "zero3", "ddp", "fsdp2", "dtensor-tp", "dtensor-tp+sp")
    result = bench(PERCEPTRON, Mesh({"ranks": 2}), strategies, steps=2, hardware="cpu")
    return {each.strategy: each for each in result.measurements}


PARAMETER_BYTES = 4 * 3 * (HIDDEN * HIDDEN + HIDDEN)


@pytest.mark.slow
def test_every_strategy_has_the_losses_of_one_process(measured: Mapping[str, Measurement]) -> None:
    trained = [each for each in measured.values() if each.measured is not None]
    assert len(trained) == 6
    assert all(each.agrees and each.apart is not None for each in trained)


@pytest.mark.parametrize("strategy", [AUTO, "data_parallel", "zero3"])
def test_autopar_moves_the_bytes_that_it_predicts(measured: Mapping[str, Measurement], strategy: str) -> None:
    assert measured[strategy].moved_as_predicted is True


def test_data_parallelism_and_ddp_reduce_each_gradient_once(measured: Mapping[str, Measurement]) -> None:
    for strategy in ("data_parallel", "ddp"):
        costs = measured[strategy].measured
        assert costs is not None
        reduced = costs.traffic["all_reduce/ranks"]
        assert PARAMETER_BYTES <= reduced <= PARAMETER_BYTES + 64  # and the loss


def test_what_peers_move_is_counted(measured: Mapping[str, Measurement]) -> None:
    sharded, split = measured["fsdp2"], measured["dtensor-tp"]
    assert sharded.measured is not None and split.measured is not None
    assert sharded.measured.traffic["reduce_scatter/ranks"] == PARAMETER_BYTES
    assert PARAMETER_BYTES < sharded.measured.traffic["all_gather/ranks"] <= 2 * PARAMETER_BYTES
    assert split.measured.traffic == {"all_reduce/ranks": 4 * BATCH * HIDDEN}
    assert split.calls == {"all_reduce/ranks": 1}


def test_only_plans_have_predictions(measured: Mapping[str, Measurement]) -> None:
    assert {name for name, each in measured.items() if each.predicted is not None} == {AUTO, "data_parallel", "zero3"}


def test_peak_memory_holds_what_is_trained(measured: Mapping[str, Measurement]) -> None:
    whole, part = measured["ddp"].measured, measured["dtensor-tp"].measured
    assert whole is not None and part is not None
    assert whole.peak_bytes > 4 * PARAMETER_BYTES > part.peak_bytes  # with gradients and two moments


def test_a_strategy_that_does_not_apply_has_a_reason(measured: Mapping[str, Measurement]) -> None:
    refused = measured["dtensor-tp+sp"]
    assert refused.measured is None and refused.reason == "the model has no sequence"


def _weights() -> list[list[torch.Tensor]]:
    """The weights of a contestant at the start, after its first steps, and after the timed ones."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    cell = Cell(PERCEPTRON, Mesh({"ranks": 2}), ("data_parallel",), TERMS, steps=2)
    built = contestant("data_parallel", *cell.subject(), mesh, TERMS)
    found = []

    def look() -> None:
        found.append([parameter.detach().clone() for parameter in built.model.parameters()])

    look()
    entry = _first_steps("data_parallel", built, mesh, 0)
    look()
    _in_turns(cell, [entry])
    look()
    return found


@pytest.mark.slow
def test_a_contestant_learns_in_its_first_steps_and_not_while_it_is_timed(ranks: Ranks) -> None:
    for start, learnt, timed in ranks.run(_weights):
        assert not any(map(torch.equal, start, learnt))
        assert all(map(torch.equal, learnt, timed))


def test_a_model_that_fails_alone_ends_the_run_with_its_message() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 0 of 1 failed: .*Target 1|out of bounds"):
        on_ranks(World(1), _broken_alone, ())


def _broken_alone() -> None:
    Trainer(*broken()).step()


@pytest.mark.slow
def test_a_fake_world_times_one_rank_of_many() -> None:
    result = bench(PERCEPTRON, Mesh({"ranks": 8}), ("data_parallel", "dtensor-tp", "ddp"), steps=1, fake=True)
    for each in result.measurements[:2]:
        assert each.measured is not None and each.measured.seconds > 0, each.reason
        assert each.apart is None
    assert result.measurements[0].moved_as_predicted is True
    assert result.measurements[2].reason.startswith("DistributedDataParallel waits for the results of its collectives")
    assert "losses       agree" not in str(result)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zero1")
def test_strategies_with_the_same_program_are_timed_once() -> None:
    strategies = ("zero1", "zero2", "zero3")
    result = bench(PERCEPTRON, Mesh({"ranks": 8}), strategies, steps=1, fake=True)
    first, second, third = result.measurements
    assert (first.same_as, second.same_as, third.same_as) == ("", "zero1", "")
    assert first.measured is not None and second.measured is not None and third.measured is not None
    assert first.measured.seconds == second.measured.seconds != third.measured.seconds
    assert "zero2 = zero1" in str(result)


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({AUTO: "a", "zero3": "b", "data_parallel": "a"}, {AUTO: "data_parallel"}),
        ({AUTO: "a", "zero2": "b", "zero3": "b", "hsdp": "b"}, {"zero3": "zero2", "hsdp": "zero2"}),
        ({"ddp": None, "fsdp2": None, AUTO: "a"}, {}),
    ],
)
def test_a_preset_runs_for_the_plan_that_is_the_same(
    programs: Mapping[str, str | None], expected: Mapping[str, str]
) -> None:
    entries = [SimpleNamespace(name=name, contestant=SimpleNamespace(program=p)) for name, p in programs.items()]
    assert _same_programs(entries) == expected  # pyright: ignore[reportArgumentType]


def test_a_strategy_that_fails_is_a_reason_and_ends_nothing() -> None:
    def fail() -> None:
        raise ZeroDivisionError("no step today")

    alone = Cell(PERCEPTRON, Mesh({"ranks": 1}), (AUTO,), TERMS, fake=True)
    assert _tried(alone, fail) == (None, "failed: ZeroDivisionError: no step today")
    assert _tried(alone, lambda: 3) == (3, "")


def _unequal() -> tuple[object, str]:
    def work() -> int:
        if dist.get_rank() == 1:
            raise InputError("not on rank 1")
        return 3

    return _tried(Cell(PERCEPTRON, Mesh({"ranks": 2}), (AUTO,), TERMS), work)


def test_a_strategy_that_fails_on_one_rank_is_dropped_on_all(ranks: Ranks) -> None:
    assert ranks.run(_unequal) == 2 * [(None, "not on rank 1")]


def _die() -> None:
    if dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()


def test_a_rank_that_dies_ends_the_run() -> None:
    with pytest.raises(RankError, match=r"^rank \d of 2 failed: "):
        on_ranks(World(2), _die, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategies": ("zero4",)},
            r"^no strategy 'zero4'; there are auto, .*, ddp, fsdp2, dtensor-tp, dtensor-tp\+sp",
        ),
        ({"models": "tiny-gpt3"}, "^no built-in model 'tiny-gpt3'"),
        ({"models": ()}, "^found 0 models, 1 meshes and 20 steps; give at least one of each"),
        ({"steps": 0}, "^found 1 models, 1 meshes and 0 steps"),
        ({"device": "tpu"}, "^device 'tpu' is not known"),
        ({"device": "cuda", "meshes": Mesh({"ranks": 4096})}, r"^the mesh ranks=4096 needs 4096 GPUs, found \d+"),
        ({"memory": "much"}, "^'much' is no size"),
        ({"hardware": "abacus"}, "^hardware 'abacus' is not known"),
        ({"meshes": Mesh({"ranks": 1})}, "^the mesh ranks=1 is of a single rank, with nothing to compare"),
        ({"models": "tests.tools.benchmarking.test_bench:nowhere"}, "has no function 'nowhere'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_rank_starts(changes: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"models": "tiny-mlp", "meshes": Mesh({"ranks": 2}), "strategies": (AUTO,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "on_ranks", lambda *_: pytest.fail("a rank was started"))
        with pytest.raises(AutoparError, match=message):
            bench(**{**options, **changes})  # pyright: ignore[reportArgumentType]


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> list[Mesh]:
    """The meshes that were calibrated, and no rank is started."""
    found: list[Mesh] = []

    def calibrate(mesh: Mesh, device: str, effort: object, name: str) -> dict[str, object]:
        found.append(mesh)
        return {**json.loads((PROFILES / "cpu.json").read_text()), "name": name}

    monkeypatch.setattr(bench_module, "calibrate", calibrate)
    return found


def test_predictions_are_made_with_what_this_machine_does_on_the_same_mesh(
    calibrated: list[Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: list[Cell] = []

    def measure(world: World, work: object, arguments: tuple[Cell], preload: object) -> list[Measurement]:
        cells.extend(arguments)
        return []

    monkeypatch.setattr(bench_module, "on_ranks", measure)
    meshes = [Mesh({"dp": 4}), Mesh({"dp": 2}), Mesh({"dp": 2, "tp": 2})]
    result = bench("tiny-mlp", meshes, (AUTO,))
    assert calibrated == meshes
    names = [cell.terms.hardware.name for cell in cells]
    assert names == ["this machine, dp=4", "this machine, dp=2", "this machine, dp=2 × tp=2"]
    assert [(cell.terms.profile or {}).get("name") for cell in cells] == names
    assert result.about["profile"] == ", ".join(names)
    assert f"{os.cpu_count()} cores (load " in result.about["machine"]


def _raced(slowness: float) -> float:
    """The predicted seconds on a machine that computes so many times more slowly when the model is measured."""
    profile = json.loads((PROFILES / "cpu.json").read_text())

    def measured_anew(found: dict[str, Any], *_: object) -> dict[str, Any]:
        flops = {name: {**each, "value": each["value"] / slowness} for name, each in found["flops"].items()}
        return {**found, "flops": flops, "op_latency_s": {**found["op_latency_s"], "value": 1e-9}}

    terms = Terms(load("h100"), profile=profile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "measured_anew", measured_anew)
        (found,) = race(Cell(PERCEPTRON, Mesh({"ranks": 2}), ("fully_replicated",), terms, steps=1))
    assert found.predicted is not None
    return found.predicted.seconds


def test_predictions_are_for_the_machine_as_it_computes_when_a_model_is_measured(ranks: Ranks) -> None:
    (fast, _), (slow, _) = ranks.run(_raced, 1.0), ranks.run(_raced, 1e6)
    assert slow > 1000 * fast


def test_no_machine_is_calibrated_for_a_profile_that_is_given_or_a_fake_world(
    calibrated: list[Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "on_ranks", lambda *_: [])
    assert bench("tiny-mlp", Mesh({"dp": 2}), (AUTO,), hardware="h100").about["profile"] == "h100"
    assert bench("tiny-mlp", Mesh({"dp": 64}, "a100"), (AUTO,), fake=True).about["profile"] == "a100"
    assert calibrated == []


def test_a_cell_whose_ranks_die_is_a_reason_next_to_others_and_an_error_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise RankError("rank 1 of 2 failed: out of memory")

    monkeypatch.setattr(bench_module, "on_ranks", die)
    result = bench(["tiny-mlp", "tiny-cnn"], Mesh({"dp": 2}), (AUTO, "ddp"), hardware="cpu")
    assert [each.reason for each in result.measurements] == 4 * ["rank 1 of 2 failed: out of memory"]
    with pytest.raises(RankError, match="out of memory"):
        bench("tiny-mlp", Mesh({"dp": 2}), (AUTO,), hardware="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "2"], "no model is named; give some, or --suite small"),
        (["tiny-mlp"], "no mesh is given; give --mesh"),
        (["tiny-mlp", "--mesh", "none"], "'none' is no mesh"),
        (["tiny-mlp", "--suite", "small"], "--suite small has models and meshes of its own"),
        (["tiny-mlp", "--fake-world", "8", "--mesh", "2"], "--fake-world 8 and the mesh dp=2 (2 ranks) differ"),
        (["tiny-mlp", "--mesh", "2", "--csv", "none/a.csv"], "none/a.csv is in no folder that exists; make it first"),
        (["tiny-mlp", "--mesh", "2", "--json", "none/a.json"], "none/a.json is in no folder that exists"),
    ],
)
def test_options_that_do_not_fit_are_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_files_are_written_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = BenchResult((Measurement("demo", "dp=2", AUTO, reason="not today"),))
    monkeypatch.setattr("autopar.tools.benchmarking.bench.bench", lambda *_, **__: result)
    assert main(["bench", "demo", "--mesh", "2", "--csv", "a.csv", "--json", "a.json"]) == 0
    assert "saved in a.csv" in capsys.readouterr().out and (tmp_path / "a.csv").is_file()
    assert BenchResult.load("a.json") == result
    (tmp_path / "folder").mkdir()
    assert main(["bench", "demo", "--mesh", "2", "--csv", "folder"]) == 2
    assert "the measurements cannot be saved" in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("autopar.tools.benchmarking.bench.bench", lambda *_, **__: pytest.fail("it was measured"))
    assert main(["bench", "demo", "--mesh", "2", "--plots", "plots"]) == 2
    assert 'pip install "autopar[bench]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "models", "meshes"),
    [
        (["tiny-mlp", "demo", "--mesh", "2", "2x2"], ("tiny-mlp", "demo"), [{"dp": 2}, {"dp": 2, "tp": 2}]),
        (["demo", "--fake-world", "64"], ("demo",), [{"dp": 64}]),
        (["--suite", "small"], bench_command.SUITES["small"].models, [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}]),
    ],
)
def test_the_command_measures_the_cells_it_was_requested(
    arguments: list[str],
    models: tuple[str, ...],
    meshes: list[dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[tuple[object, object]] = []

    def measure(models: object, meshes: object, strategies: object, **_: object) -> BenchResult:
        found.append((tuple(models), [dict(mesh.axes) for mesh in meshes]))  # pyright: ignore
        return BenchResult((Measurement("demo", "dp=2", AUTO, reason="not today"),))

    monkeypatch.setattr("autopar.tools.benchmarking.bench.bench", measure)
    assert main(["bench", *arguments]) == 0
    assert found == [(models, meshes)]
    assert "auto: not today" in capsys.readouterr().out


def test_losses_that_disagree_end_the_command_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = BenchResult((Measurement("demo", "dp=2", AUTO, apart=0.5),))
    monkeypatch.setattr("autopar.tools.benchmarking.bench.bench", lambda *_, **__: wrong)
    assert main(["bench", "demo", "--mesh", "2"]) == 1


def test_strategies_are_the_plan_the_presets_and_the_peers() -> None:
    names = strategy_names()
    assert names[0] == AUTO and names[-len(PEERS) :] == tuple(PEERS)
    assert {"data_parallel", "zero3", "megatron"} < set(names)


def test_equal_seeds_give_equal_weights_and_data() -> None:
    (model, inputs), (again, same) = (trainable("tiny-cnn", 2, 1, 1, "cpu", seed=3) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(inputs, same, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
    assert inputs[0].std() > 0.5 and inputs[1].max() < 64


def test_inputs_that_are_no_tuple_of_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="inputs that are no tuple of tensors"):
        trainable("tests.tools.benchmarking.test_bench:with_a_list", 2, 1, None, "cpu", seed=0)


@pytest.mark.parametrize(
    ("name", "num_parts", "sequence", "reason"),
    [
        ("tiny-gpt2", 2, False, "the model keeps its weights in Conv1D modules"),
        ("tiny-cnn", 2, False, "the model is made of convolutions"),
        ("tiny-vit", 2, True, "an image has one token more than it has patches"),
        ("tiny-vit", 3, False, "8 heads do not divide over 3 ranks"),
        ("tiny-llama", 8, False, "4 key heads do not divide over 8 ranks"),
        ("tiny-llama", 4, True, "30 tokens of a text do not divide over 4 ranks"),
        ("tiny-mlp", 3, False, "1024 outputs of layers.0.0 do not divide over 3 ranks"),
        ("t5-large", 2, False, "no tensor-parallel plan is written for EncoderDecoder"),
    ],
)
def test_a_model_that_dtensor_cannot_split_has_a_reason(name: str, num_parts: int, sequence: bool, reason: str) -> None:
    from autopar.models.catalogue import built_in

    model, inputs = built_in(name, 4, 30, num_layers=1)
    plan = tensor_parallel_plan(model, num_parts, inputs, sequence)
    assert isinstance(plan, str) and plan.startswith(reason)


def test_a_fake_world_is_one_process() -> None:
    assert on_ranks(World(64, fake=True), _world_size, ()) == (0, 64)


def _world_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def test_the_backends_are_those_of_the_devices() -> None:
    assert launch.BACKENDS == {"cpu": "gloo", "cuda": "nccl"}
