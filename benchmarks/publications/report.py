"""Report of the command: accuracy of the predictions by source, and reasons why rows have none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from benchmarks.publications.accuracy import confusion, errors, pairs_in_order
from benchmarks.publications.choice import Cell, share_within
from benchmarks.publications.contradicted import Contradiction
from benchmarks.publications.megatron import BLOOM, GOLDEN, allocated_bytes, device_bytes
from benchmarks.publications.megatron import runs_out as overflows
from benchmarks.publications.memory import CAPACITY, allocated, at_the_peak, factors, fragmentation, runs_out
from benchmarks.publications.parts import Part
from benchmarks.publications.prediction import Outcome

SCHEDULED = "zero bubble"
COUNTED = {"between steps": "allocated_bytes", "at the peak": "peak_bytes"}
"""Quantity that the allocator counts → field of a row."""
APART = 0.1
"""Share by which two peaks of golden values differ whose order counts."""


def group(outcome: Outcome) -> str:
    """The line of the table: the source, nanotron's with and without a pipeline apart."""
    row = outcome.row
    if row.source == "nanotron":
        return f"nanotron pp {'= 1' if row.pp == 1 else '> 1'}"
    return row.source


def times(found: Sequence[Outcome], contradictions: Sequence[Contradiction] = ()) -> str:
    """Seconds by source, and once more without the runs that others of the same table contradict."""
    lines = []
    measured = [each for each in found if each.predicted and each.row.seconds]
    grouped = _grouped(measured)
    for name, own in _grouped(without(measured, contradictions)).items():
        if len(own) < len(grouped[name]):
            grouped[f"{name}, not contradicted"] = own
    whole = [("all rows", measured)] if len(_grouped(measured)) > 1 else []
    for name, own in (*sorted(grouped.items()), *whole):
        if len(own) < 2:
            continue
        every = errors([each.seconds for each in own], [each.row.seconds or 0.0 for each in own])
        lines.append(
            (name, every.count, f"{every.mean:.1%}", f"{every.median:+.1%}", f"{every.median_absolute:.1%}",
             f"{every.spearman:.3f}")
        )  # fmt: skip
    return tabulate(lines, ("seconds of a step", "rows", "MAPE", "median", "median, absolute", "Spearman"))


def without(found: Sequence[Outcome], contradictions: Sequence[Contradiction]) -> list[Outcome]:
    """The outcomes of runs that no other run contradicts."""
    left_out = [each.row for each in contradictions]
    return [each for each in found if each.row not in left_out]


def contradicted_runs(contradictions: Sequence[Contradiction]) -> str:
    """The runs that others of the same table contradict; whether they are of a sample is not looked at."""
    lines = [
        (each.row.label, f"{each.row.seconds:.4g}", f"{each.enough:.4g}", each.by.label, f"{each.by.seconds:.4g}")
        for each in contradictions
    ]
    headers = ("contradicted by other runs", "measured s", "enough s", "by", "measured s")
    return tabulate(lines, headers, disable_numparse=True) if lines else ""


def memory(found: Sequence[Outcome]) -> str:
    """Bytes between steps and at the peak, and out-of-memory told right."""
    planned = [each for each in found if each.predicted is not None and each.row.source not in (GOLDEN, BLOOM)]
    factor = {id(each): by for each, by in zip(planned, factors(planned), strict=True)}
    lines = []
    for name, own in _grouped(planned).items():
        for what, predicted, measured in (
            ("allocated between steps", allocated, "allocated_bytes"),
            ("reserved, from tensors at the peak", at_the_peak, "reserved_bytes"),
            ("reserved, with fragmentation", lambda each: factor[id(each)] * at_the_peak(each), "reserved_bytes"),
        ):
            known = [each for each in own if getattr(each.row, measured)]
            if len(known) >= 2:
                every = errors([predicted(each) for each in known], [getattr(each.row, measured) for each in known])
                lines.append((name, what, every.count, f"{every.median:+.1%}", f"{every.median_absolute:.1%}"))
    text = tabulate(lines, ("bytes of a device", "", "rows", "median", "median, absolute")) if lines else ""
    limited = [each for each in planned if each.row.device in CAPACITY and (each.row.seconds or each.row.out_of_memory)]
    if any(each.row.out_of_memory for each in limited):
        fails = [each.row.out_of_memory for each in limited]
        for what, told in (
            ("from tensors at the peak", [runs_out(each) for each in limited]),
            ("with fragmentation", [runs_out(each, factor[id(each)]) for each in limited]),
        ):
            of = confusion(fails, told)
            text += (
                f"\n\nout of memory told right, {what}: {of.share:.1%} of {len(limited)} runs; {of.fitting_told} of "
                f"{of.fitting} that fit, {of.failing_told} of {of.failing} that do not"
            )
    if lines:
        both = ([each for each in planned if (each.row.pp > 1) == on_pipeline] for on_pipeline in (False, True))
        alone, staged = map(fragmentation, both)
        text += (
            f"\n\nfragmentation {alone:.2f} without a pipeline, {staged:.2f} with one; of each run that of models of "
            "other folds"
        )
    return text


def golden(found: Sequence[Outcome]) -> str:
    """Bytes that Megatron-LM's golden values count on the last rank, by autopar's conventions and by Megatron's."""
    lines = []
    for conventions in ("autopar", "megatron"):
        own = [
            each
            for each in found
            if each.row.source == GOLDEN and each.row.conventions == conventions and each.predicted is not None
        ]
        for number, (what, measured) in enumerate(
            (("between steps", "allocated_bytes"), ("at the peak", "peak_bytes"))
        ):
            known = [each for each in own if getattr(each.row, measured)]
            if len(known) < 2:
                continue
            told = [allocated_bytes(each) for each in known]
            pair = [each[number] + each.workspaces for each in told], [getattr(each.row, measured) for each in known]
            every, (right, pairs) = errors(*pair), pairs_in_order(*pair, APART)
            lines.append(
                (conventions, what, every.count, f"{every.mean:.1%}", f"{every.median:+.1%}",
                 f"{every.spearman:.3f}", f"{right} of {pairs} ({right / max(pairs, 1):.1%})")
            )  # fmt: skip
    headers = (
        "golden values by conventions of",
        "",
        "rows",
        "MAPE",
        "median",
        "Spearman",
        "pairs > 10% apart in order",
    )
    return tabulate(lines, headers) if lines else ""


def bloom(found: Sequence[Outcome]) -> str:
    """GB of BLOOM's devices by nvidia-smi, and whether its runs fit."""
    own = [each for each in found if each.row.source == BLOOM and each.predicted is not None]
    if not own:
        return ""
    of = confusion([each.row.out_of_memory for each in own], [overflows(each) for each in own])
    text = (
        f"BLOOM, fits told right: {of.share:.1%} of {len(own)} runs; {of.fitting_told} of {of.fitting} that fit, "
        f"{of.failing_told} of {of.failing} that do not"
    )
    known = [each for each in own if each.row.device_bytes]
    if len(known) < 2:
        return text
    every = errors([device_bytes(each) for each in known], [each.row.device_bytes or 0.0 for each in known])
    return (
        f"{text}\nBLOOM, bytes of a device: MAPE {every.mean:.1%}, median {every.median:+.1%}, Spearman "
        f"{every.spearman:.3f} of {every.count} runs"
    )


def order_of_schedules(found: Sequence[Outcome]) -> str:
    """Return a line that counts the pairs of schedules, of one model and batch, that are in the measured order."""
    grouped: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for each in found:
        if each.row.source == SCHEDULED and each.predicted and each.row.seconds:
            grouped[each.row.model, each.row.accumulation].append(each)
    counts = [
        pairs_in_order([each.seconds for each in own], [each.row.seconds or 0.0 for each in own])
        for own in grouped.values()
    ]
    right, every = (sum(each[n] for each in counts) for n in (0, 1))
    return f"schedules of one model and batch in the measured order: {right} of {every} pairs" if every else ""


def choices(made: Sequence[Cell], undisputed: Sequence[Cell] = ()) -> str:
    """The regret of choosing by prediction, and how it is shared among cells without runs that others contradict."""
    if not made:
        return ""
    lines = [
        (each.model, each.devices, each.runs, each.chosen, each.fastest, f"{each.regret:.1%}", f"{each.by_chance:.1%}")
        for each in made
    ]
    headers = ("model", "GPUs", "runs", "chosen", "fastest", "regret", "by chance")
    specified = [f"{_regret(made)} of {len(made)} cells"]
    if undisputed:
        specified.append(f"without contradicted runs {_regret(undisputed)} of {len(undisputed)} cells")
    return "\n\n".join((tabulate(lines, headers), *specified))


def _regret(made: Sequence[Cell]) -> str:
    return f"regret of at most 5% in {share_within(made, 0.05):.0%}, of at most 15% in {share_within(made, 0.15):.0%}"


def reasons(found: Sequence[Outcome]) -> str:
    """Rows without a prediction, grouped by what is in the way."""
    once = [each for each in found if each.row.conventions != "megatron"]
    counts = Counter((each.row.source, each.reason) for each in once if each.predicted is None)
    lines = [(source, count, reason) for (source, reason), count in sorted(counts.items())]
    return tabulate(lines, ("not expressed", "rows", "why")) if lines else ""


def memory_parts(found: Sequence[Part]) -> str:
    """Return parts of memory as papers show them, compared with those of plans."""
    lines = [
        (each.model, each.mode, each.quantity, f"{each.predicted:.1f}", f"{each.measured:.1f}", each.unit)
        for each in found
        if each.predicted is not None
    ]
    headers = ("model", "mode", "part", "predicted", "measured", "unit")
    missing = sum(each.predicted is None for each in found)
    return f"{tabulate(lines, headers, disable_numparse=True)}\n\n{missing} lines of models that are not built"


def rows(found: Sequence[Outcome]) -> str:
    """A line for each row."""
    lines = []
    for each in found:
        if each.predicted is None:
            continue
        row, measured = each.row, each.row.seconds
        lines.append(
            (
                row.source,
                row.label,
                f"{each.seconds:.4g}",
                f"{measured:.4g}" if measured else "out of memory" if row.out_of_memory else "",
                f"{each.seconds / measured - 1:+.0%}" if measured else "",
                f"{at_the_peak(each) / 1e9:.1f}",
                f"{row.reserved_bytes / 1e9:.1f}" if row.reserved_bytes else "",
            )
        )
    headers = ("source", "row", "predicted s", "measured s", "", "predicted GB", "measured GB")
    return tabulate(lines, headers, disable_numparse=True)


def _grouped(found: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    grouped: dict[str, list[Outcome]] = defaultdict(list)
    for each in found:
        grouped[group(each)].append(each)
    return dict(sorted(grouped.items()))
