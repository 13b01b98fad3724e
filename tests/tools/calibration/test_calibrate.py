"""`autopar calibrate`: on ranks of its own and on ranks that are there, and what it says to input that cannot work."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.costs.hardware.collectives import Transfer, levels_of, pieces, steps_and_share, transfer_seconds
from autopar.costs.hardware.load import PROFILES, load, parse
from autopar.costs.hardware.profile import Efficiencies, Hardware, Latencies, Link
from autopar.errors import InputError, PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.collectives.mesh_axes import Axis, record_traffic
from autopar.runtime.ranks.launch import RankError
from autopar.tools.calibration import calibrate as module
from autopar.tools.calibration.calibrate import CalibrationError, calibrate, check, few_numbers, measured_anew
from autopar.tools.calibration.command import add_arguments, run
from autopar.tools.calibration.fit import Fit, Line, Sample
from autopar.tools.calibration.timing import COLLECTIVES, FEW_BYTES, SHORTEST, Effort, Timer
from tests.support.ranks import Ranks

TINY = Effort((1 << 8, 1 << 12, 1 << 16), (16, 32), 2)


def _options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def _sources(profile: Any) -> list[str]:
    """The sources of all numbers; a number without one is an error."""
    if isinstance(profile, Mapping):
        if "value" in profile:
            return [profile["source"]]
        return [source for entry in profile.values() for source in _sources(entry)]
    if isinstance(profile, list):
        return [source for entry in profile for source in _sources(entry)]
    assert profile is None or isinstance(profile, str), f"{profile} has no source"
    return []


def test_ranks_of_its_own_write_a_profile_that_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autopar.tools.calibration.timing.QUICK", TINY)
    path = tmp_path / "box.json"
    assert run(_options(str(path), "--ranks", "2", "--quick")) == 0
    hardware = load(path)
    assert hardware.name == "box"
    assert set(hardware.flops) == {"float64", "float32", "bfloat16", "float16"}
    assert [(link.name, link.devices) for link in hardware.links] == [("gloo in a node", None)]
    for collective in COLLECTIVES:
        ((_, seconds_per_byte), *_) = pieces(collective, Mesh({"dp": 2}), "dp", hardware)
        assert seconds_per_byte > 0
    written = json.loads(path.read_text())
    sources = _sources(written)
    assert len(sources) > 12
    measured = [source for source in sources if source.startswith("measured: ") and "autopar calibrate" in source]
    assert set(sources) == set(measured)
    assert (
        0 <= hardware.communication_share <= 1 and "overlapped with matmuls" in written["communication_share"]["source"]
    )
    assert set(written["links"][0]["fit_error"]) == set(COLLECTIVES)
    specified = capsys.readouterr().out
    assert "2 ranks (load " in specified
    assert f"saved in {path}" in specified


def _on_two_nodes(mesh: Mesh | int) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return calibrate(mesh, effort=TINY, name="two nodes")
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.slow
def test_ranks_that_are_there_measure_each_level(ranks: Ranks) -> None:
    profiles = ranks.run(_on_two_nodes, 4, world_size=4)
    assert all(profile == profiles[0] for profile in profiles), "every rank has the numbers of rank 0"
    inner, outer = parse(profiles[0]).links
    assert (inner.name, inner.devices, outer.name, outer.devices) == (
        "gloo in a node",
        2,
        "gloo between nodes",
        None,
    )
    messages = [[p.name for p in link.protocols if p.algorithm == "ring"] for link in (inner, outer)]
    assert messages[0] == messages[1]
    source = profiles[0]["links"][1]["bytes_per_s"]["source"]
    assert "all_reduce, all_gather, reduce_scatter, all_to_all over node=2, between nodes" in source


def _on_two_axes() -> Any:
    return calibrate(Mesh({"dp": 2, "tp": 2}), effort=TINY)


@pytest.mark.slow
def test_joined_axes_are_measured_next_to_the_axes(ranks: Ranks) -> None:
    (profile, *_) = ranks.run(_on_two_axes, world_size=4)
    assert "all_to_all over dp=2 and tp=2 and dp_tp=4, in a node" in profile["links"][0]["bytes_per_s"]["source"]


def _says(mesh: Mesh) -> str:
    with pytest.raises(InputError) as caught:
        _on_two_nodes(mesh)
    return str(caught.value)


def test_an_axis_on_both_sides_of_a_node_is_refused(ranks: Ranks) -> None:
    (specified, *_) = ranks.run(_says, Mesh({"dp": 4}), world_size=4)
    assert "axis 'dp' of dp=4 lies on both sides of a node of 2 devices; give it as two axes" in specified


def _moved() -> dict[str, Any]:
    """Return the bytes that each collective of 4 kB moves during calibration."""
    group = dist.group.WORLD
    assert group is not None
    axis = Axis("dp", group.group_name, group.size(), group.rank())
    found = {}
    for name, make in COLLECTIVES.items():
        move = make(4096, axis, torch.device("cpu"))
        with record_traffic() as traffic:
            move()
        found[name] = dict(traffic.num_bytes)
    return found


def test_a_collective_moves_the_bytes_by_which_it_is_counted(ranks: Ranks) -> None:
    for found in ranks.run(_moved, world_size=4):
        assert found == {name: {(name, "dp"): 4096} for name in COLLECTIVES}


class _Clocked(Timer):
    """A timer on a rank of its own whose clock advances by the given seconds of calls."""

    def __init__(self, repetitions: int) -> None:
        super().__init__(torch.device("cpu"), Effort((1 << 12,), (16,), repetitions))
        self.now = 0.0

    def seconds(self, call: Callable[[], object], inner: int = 1) -> float:
        before = self.now
        for _ in range(inner):
            call()
        return (self.now - before) / inner

    def _slowest(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def spend(self, seconds: Iterator[float]) -> Callable[[], None]:
        """A call that takes the next of the seconds."""

        def call() -> None:
            self.now += next(seconds)

        return call


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.mark.usefixtures("alone")
def test_the_median_of_the_repetitions_counts() -> None:
    timer = _Clocked(5)
    first = itertools.chain([1.0, 1.0], [7.0, 2.0, 3.0, 1.0, 2.5])  # two calls come before those that count
    assert timer.median_seconds([timer.spend(first)], "calls", 0.0) == [2.5]


def _have_take(
    monkeypatch: pytest.MonkeyPatch, timer: _Clocked, seconds: Callable[[str], Iterator[float]], few: float
) -> None:
    """Have computation take 4 seconds, a collective of that name the given ones, a reduction of few numbers `few`."""
    monkeypatch.setattr(timer, "_piece", lambda: timer.spend(itertools.repeat(4.0)))
    monkeypatch.setattr(
        "autopar.tools.calibration.timing._all_reduce_of", lambda *_: timer.spend(itertools.repeat(few))
    )
    for name in COLLECTIVES:
        call = timer.spend(seconds(name))
        monkeypatch.setitem(COLLECTIVES, name, lambda *_, call=call: call)


@pytest.mark.usefixtures("alone")
def test_a_collective_costs_what_a_computation_and_it_take_beyond_the_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = _Clocked(3)
    costs = {"all_reduce": 2.0, "all_gather": -1.0}
    _have_take(monkeypatch, timer, lambda name: itertools.repeat(costs.get(name, 1.0)), 0.5)
    found = timer.collectives(Axis("dp", "", 2, 0))
    assert found["all_reduce", 4096] == 2.0
    assert found["all_reduce", FEW_BYTES] == 0.5
    assert found["all_gather", 4096] == SHORTEST, "faster than nothing is a disturbance"


@pytest.mark.usefixtures("alone")
def test_a_collective_that_disturbances_hide_takes_what_could_not_be_told_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = _Clocked(4)
    disturbed = [-3.0, -2.0, 1.0, 2.0]  # above the computation alone: quartiles -2.25 and 1.25
    # Two calls come before those that count.
    _have_take(monkeypatch, timer, lambda _: itertools.chain([1.0, 1.0], disturbed), 1.0)
    found = timer.collectives(Axis("dp", "", 2, 0))
    assert found["all_gather", 4096] == pytest.approx(1.253 * 3.5 / 1.349 / 2, rel=1e-3)
    assert found["all_reduce", FEW_BYTES] == 1.0


@pytest.mark.usefixtures("alone")
def test_groups_are_kept_in_step_over_the_other_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = _Clocked(3)
    reduced: list[str] = []

    def all_reduce_of(_: torch.Tensor, axis: Axis) -> Callable[[], None]:
        return lambda: (reduced.append(axis.name), timer.spend(itertools.repeat(0.5))())[1]

    _have_take(monkeypatch, timer, lambda _: itertools.repeat(2.0), 0.5)
    monkeypatch.setattr("autopar.tools.calibration.timing._all_reduce_of", all_reduce_of)
    found = timer.collectives(Axis("dp", "", 2, 0), Axis("tp", "", 2, 0))
    assert set(found.values()) == {2.0, 0.5}, "what is done to keep step is in no collective's seconds"
    assert reduced.count("tp") == (len(found) + 1) * reduced.count("dp")


@given(
    num_ranks=st.integers(2, 9),
    few_s=st.floats(1e-6, 1e-2),
    times=st.floats(1.3, 10.0),
    per_byte=st.floats(1e-11, 1e-8),
    efficiency=st.floats(0.1, 1.0),
    slower=st.floats(0.5, 2.0),
)
def test_a_few_numbers_take_what_was_measured_and_messages_what_the_fit_says(
    num_ranks: int, few_s: float, times: float, per_byte: float, efficiency: float, slower: float
) -> None:
    assume(few_s > 4 * FEW_BYTES * per_byte / efficiency)
    mesh, plain = Mesh({"dp": num_ranks}), Link("plain", None, 0.0, 1.0)
    (level,) = levels_of([plain], mesh, "dp")
    found = Fit((Line(times * few_s / slower, 0.0, per_byte),), 0.0, {"all_reduce": efficiency}, {"all_reduce": slower})

    def sample(algorithm: str, num_bytes: int, seconds: float) -> Sample:
        steps, share = steps_and_share("all_reduce", algorithm, level, num_ranks)
        return Sample(steps, share * num_bytes, seconds)

    messages = [sample("ring", num_bytes, 1.0) for num_bytes in (4096, 1 << 20)]
    few = few_numbers([sample("tree", FEW_BYTES, few_s)], messages, found)
    assert few is not None
    factors = Efficiencies(all_reduce=efficiency), Latencies(all_reduce=slower)
    link = Link("link", None, 0.0, found.bytes_per_s, (*found.protocols(["messages"]), few), *factors)
    hardware = Hardware("box", {"float32": 1.0}, 1.0, 1, 0.0, (link,))

    def seconds(num_bytes: int) -> float:
        return transfer_seconds(Transfer("all_reduce", "dp", num_bytes), mesh, hardware)

    assert seconds(FEW_BYTES) == pytest.approx(few_s)
    for message, num_bytes in zip(messages, (4096, 1 << 20), strict=True):
        assert seconds(num_bytes) == pytest.approx(found.seconds(message))


def test_a_few_numbers_that_are_not_clearly_faster_are_messages() -> None:
    found = Fit((Line(1e-3, 0.0, 1e-9),), 0.0, {})
    messages = [Sample(2, 4096.0, 1e-3)]
    assert few_numbers([Sample(2, 16.0, 0.9e-3)], messages, found) is None
    assert few_numbers([Sample(2, 16.0, 0.7e-3)], messages, found) is not None


def _again() -> tuple[Any, Any]:
    known = json.loads((PROFILES / "h100.json").read_text())
    return known, measured_anew(known, "cpu", TINY)


def _again_in_half_precision() -> Any:
    return measured_anew(json.loads((PROFILES / "h100.json").read_text()), "cpu", replace(TINY, dtype=torch.bfloat16))


@pytest.mark.slow
def test_what_devices_compute_is_measured_again_and_links_stay(ranks: Ranks) -> None:
    (known, found), other = ranks.run(_again)
    assert other == (known, found)
    assert found["links"] == known["links"] and found["name"] == known["name"]
    assert "2 ranks" in found["flops"]["float32"]["source"]
    assert parse(found).flops["float32"] < parse(known).flops["float32"]
    (half,) = {json.dumps(each) for each in ranks.run(_again_in_half_precision)}
    for number, of_what in (("elementwise_bytes_per_s", "norms in bfloat16"), ("memory_bytes_per_s", "in bfloat16")):
        assert of_what in json.loads(half)[number]["source"] and of_what not in found[number]["source"]


def test_one_rank_measures_its_device_and_takes_links_from_a_known_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autopar.tools.calibration.timing.QUICK", TINY)
    path = tmp_path / "alone.json"
    assert run(_options(str(path), "--ranks", "1", "--quick", "--links", "h100")) == 0
    written, known = json.loads(path.read_text()), load("h100")
    assert load(path).links == known.links
    assert load(path).communication_share == known.communication_share
    assert "1 rank (load" in written["flops"]["float32"]["source"]
    assert all("autopar calibrate" not in source for source in _sources(written["links"]))
    assert "NVLink" in capsys.readouterr().out


def test_links_are_taken_from_a_known_profile_by_one_rank_alone() -> None:
    with pytest.raises(InputError, match="links='h100' with 2 ranks, which measure their links; leave it out, or use"):
        calibrate(2, links="h100")
    with pytest.raises(PlanError, match="hardware 'h1' is not known; use one of"):
        calibrate(1, links="h1")


@pytest.mark.parametrize(
    ("mesh", "device", "message"),
    [
        (2, "tpu", "device 'tpu' is not known; calibrate measures 'cpu' or 'cuda'"),
        (
            1,
            "cpu",
            "1 rank has no collective to measure; use at least 2 ranks, or torchrun, or give one rank the links",
        ),
        (0, "cpu", "0 rank"),
        (Mesh({"dp": 1}), "cpu", "1 rank has no collective"),
    ],
)
def test_what_cannot_be_measured_is_refused(mesh: Mesh | int, device: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        calibrate(mesh, device)
    assert message in str(caught.value)


def test_cuda_needs_a_device_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device 'cuda' is not available here; use device 'cpu', or a machine"):
        check(2, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 ranks need as many devices, found 1; ask for fewer ranks"):
        check(2, "cuda")


def test_under_torchrun_the_mesh_has_the_ranks_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    check(2, "cpu")
    with pytest.raises(InputError, match="the mesh dp=2 has 2 devices, but there are 4 ranks; make them equal"):
        check(Mesh({"dp": 2}), "cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [("box.txt", "give it a name that ends in .json"), ("nowhere/box.json", "give a file in a folder that exists")],
)
def test_a_profile_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        run(_options(str(tmp_path / name)))
    assert message in str(caught.value)


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "box.json").mkdir()
    with pytest.raises(InputError, match="cannot be written; give a file"):
        run(_options(str(tmp_path / "box.json")))


def test_a_write_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.tools.calibration.calibrate.calibrate", lambda *_: {})
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(InputError, match="the profile cannot be written: no space left; give a file that can"):
        run(_options(str(tmp_path / "box.json")))


def _full(*_: object, **__: object) -> None:
    raise OSError("no space left")


def test_a_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise RankError("rank 1 of 2 failed: RuntimeError: no route to host")

    monkeypatch.setattr(module, "on_ranks", start)
    with pytest.raises(CalibrationError, match=r"^rank 1 of 2 failed: RuntimeError: no route to host"):
        calibrate(2)
