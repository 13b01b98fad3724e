"""The fit of latency and bandwidth: synthetic times come back exactly, and a second protocol only where it is due."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.costs.hardware.profile import Protocol
from autopar.tools.calibration.computing import attention_rate, product_wave
from autopar.tools.calibration.fit import Line, Sample, fit, relative_error

SIZES = [1 << power for power in range(10, 27, 2)]


def _samples(*lines: Line, steps: tuple[int, ...] = (1, 2), noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """Times by the least of some lines, off by up to `noise` of each."""
    dice = random.Random(seed)
    blank = [Sample(count, float(size), 1.0) for count in steps for size in SIZES]
    return [
        Sample(s.steps, s.num_bytes, min(line.seconds(s) for line in lines) * (1 + dice.uniform(-noise, noise)))
        for s in blank
    ]


def test_a_line_comes_back_exactly() -> None:
    line = Line(1e-5, 3e-6, 1e-9)
    found = fit(_samples(line))
    assert len(found.lines) == 1
    (got,) = found.lines
    assert (got.base_s, got.step_s, got.seconds_per_byte) == pytest.approx((1e-5, 3e-6, 1e-9), rel=1e-6)
    assert found.bytes_per_s == pytest.approx(1e9)
    assert found.error < 1e-9
    assert found.protocols(["messages"])[0].efficiency == 1.0


def test_two_protocols_come_back_as_two_lines() -> None:
    small, large = Line(1e-5, 0.0, 1e-8), Line(1e-4, 0.0, 1e-9)
    found = fit(_samples(small, large))
    assert [line.seconds_per_byte for line in found.lines] == pytest.approx([1e-8, 1e-9], rel=1e-3)
    protocols = found.protocols(["small", "large"])
    assert [p.name for p in protocols] == ["small", "large"]
    assert [p.base_latency_s for p in protocols] == pytest.approx([1e-5, 1e-4], rel=1e-2)
    assert [p.efficiency for p in protocols] == pytest.approx([0.1, 1.0], rel=1e-3)
    assert found.error < 1e-3


def test_noise_is_no_second_protocol() -> None:
    found = fit(_samples(Line(1e-4, 1e-5, 1e-9), noise=0.05))
    assert len(found.lines) == 1
    assert 0.005 < found.error < 0.05
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_much_noise_is_no_second_protocol() -> None:
    for seed in range(5):
        assert len(fit(_samples(Line(1e-4, 1e-5, 1e-9), noise=0.3, seed=seed)).lines) == 1


def test_large_messages_that_are_slower_are_no_second_protocol() -> None:
    samples = [Sample(1, float(size), 1e-5 + size * (1e-9 if size < 1 << 20 else 5e-9)) for size in SIZES]
    assert len(fit(samples).lines) == 1


def test_collectives_with_bandwidths_of_their_own_come_back_exactly() -> None:
    scatters = [replace(s, collective="reduce_scatter") for s in _samples(Line(1e-5, 3e-6, 4e-9), steps=(1,))]
    reduces = _samples(Line(1e-5, 3e-6, 1e-9), steps=(2,))
    found = fit([*reduces, *scatters])
    assert found.efficiencies == {"all_reduce": pytest.approx(1.0), "reduce_scatter": pytest.approx(0.25)}
    (line,) = found.lines
    assert (line.base_s, line.step_s, line.seconds_per_byte) == pytest.approx((1e-5, 3e-6, 1e-9), rel=1e-6)
    assert found.error < 1e-9
    assert found.seconds(scatters[-1]) == pytest.approx(scatters[-1].seconds)


def test_collectives_of_about_the_same_bandwidth_are_not_told_apart() -> None:
    gathers = [replace(s, collective="all_gather") for s in _samples(Line(1e-5, 0.0, 1.02e-9))]
    assert fit([*gathers, *_samples(Line(1e-5, 0.0, 1e-9))]).efficiencies == {}


def test_no_coefficient_is_negative() -> None:
    samples = [Sample(1, 1e3, 1e-7), Sample(1, 1e6, 2e-3), Sample(2, 1e3, 5e-8), Sample(2, 1e6, 2e-3)]
    (line,) = fit(samples).lines
    assert min(line.base_s, line.step_s) == 0.0 < line.seconds_per_byte


def test_with_one_number_of_steps_the_latency_is_the_base() -> None:
    (line,) = fit(_samples(Line(0.0, 2e-6, 1e-9), steps=(3,))).lines
    assert (line.base_s, line.step_s) == (pytest.approx(6e-6), 0.0)


def test_a_single_line_takes_all_names() -> None:
    found = fit(_samples(Line(1e-5, 0.0, 1e-9)))
    small, large = found.protocols(["small", "large"])
    assert small == Protocol("small", "ring", large.base_latency_s, large.step_latency_s, 1.0)


def test_the_error_is_relative() -> None:
    samples = [Sample(1, 1.0, 1.0), Sample(1, 1.0, 100.0)]
    assert relative_error(lambda s: s.seconds * 1.1, samples) == pytest.approx(0.1)


def test_messages_of_one_size_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="says nothing of bandwidth"):
        fit([Sample(1, 8.0, 1.0), Sample(2, 8.0, 1.0)])


def test_collectives_that_start_more_slowly_get_more_of_the_latency() -> None:
    line = Line(1e-4, 1e-5, 1e-9)
    known = {"all_reduce": (1.0, 1.0), "all_gather": (0.5, 0.8), "all_to_all": (2.0, 0.4)}
    samples = [
        Sample(3, float(size), line.latency(Sample(3, 0, 1)) * times + size * line.seconds_per_byte / share, name)
        for name, (times, share) in known.items()
        for size in SIZES
    ]
    found = fit(samples)
    assert found.error < 0.01
    latency = found.lines[0].latency(samples[0])
    for name, (times, share) in known.items():
        assert found.latencies[name] * latency == pytest.approx(times * line.latency(samples[0]), rel=1e-3)
        assert found.bytes_per_s * found.efficiencies[name] == pytest.approx(share / line.seconds_per_byte, rel=1e-3)


def test_collectives_that_start_alike_keep_one_latency() -> None:
    samples = [
        replace(s, collective=name) for name in ("all_reduce", "all_gather") for s in _samples(Line(1e-4, 0, 1e-9))
    ]
    assert fit(samples).latencies == {}


def test_collectives_are_told_apart_under_noise() -> None:
    # Of 48 times that are off by up to a half, a bandwidth of half explains too much to be left out.
    rows = _samples(Line(2e-3, 0.0, 2e-9), steps=(1, 1, 1, 1), noise=0.5, seed=2)
    named = [replace(row, collective=("all_reduce", "all_gather")[i % 2]) for i, row in enumerate(rows)]
    slower = [
        replace(row, seconds=row.seconds + row.num_bytes * 2e-9) if row.collective == "all_gather" else row
        for row in named
    ]
    assert fit(named).efficiencies == {}
    assert fit(slower).efficiencies["all_gather"] == pytest.approx(0.5, abs=0.15)


def test_what_small_products_lack_of_the_best_is_the_wave() -> None:
    """A square product of n rows takes 2n³ + n · wave FLOPs at the full rate of 1e9, here of a wave of 3e5 elements."""
    rates = {n: 1e9 * 2 * n**3 / (2 * n**3 + n * 3e5) for n in (64, 4096)}
    assert product_wave({64: rates[64], 4096: 1e9}) == pytest.approx(3e5)
    assert product_wave({64: 1e9, 4096: 1e9}) == product_wave({64: 1e9}) == 0.0


def test_attention_of_two_lengths_tells_its_rate_and_the_length_at_which_it_reaches_half() -> None:
    rates = {s: 1e9 / (1 + 300 / s) for s in (512, 2048)}
    assert attention_rate(rates) == pytest.approx((1e9, 300))
    assert attention_rate({512: 2e9, 2048: 1e9}) == (1e9, 0.0), "shorter ones are no slower: length tells nothing"


def test_attention_that_is_as_slow_over_few_queries_as_over_many_is_no_limit() -> None:
    rate, length = attention_rate({512: 1e8, 2048: 4e8})
    assert 2e9 > rate > 4e8 and 0 < length < 2048
