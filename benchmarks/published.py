"""Training steps that others have measured, compared with autopar's predictions for the same strategies.

Each row of a table is planned as it ran: degrees, micro-batches, schedule, ZeRO, recomputation. Printed are, by source,
the errors of seconds and bytes, whether out-of-memory is told right, the regret of choosing by prediction, and why
other rows have no plan. Runs that other runs of the same table contradict are listed, and figures are given with them
and without.

    python -m benchmarks.published nanotron_h100.csv vtrain_a100_single_node.csv --jobs 2 --plot published.png
    python -m benchmarks.published papers.csv --rows                a line for each row, too
    python -m benchmarks.published nanotron_h100.csv:100            so many of its rows, the same every time
    python -m benchmarks.published nanotron_h100.csv --cells 3      all runs of three models on so many GPUs
    python -m benchmarks.published memory_papers.csv                memory by part
    python -m benchmarks.published megatron_golden_a100.csv         bytes of the last rank, by two conventions
    python -m benchmarks.published bloom_before_0225.csv            seconds, bytes by nvidia-smi, and what fits
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from benchmarks.publications import machines, report
from benchmarks.publications.choice import FEWEST_RUNS, cells
from benchmarks.publications.contradicted import Contradiction, contradicted
from benchmarks.publications.folds import of_cells, sampled
from benchmarks.publications.megatron import BLOOM, by_both_conventions
from benchmarks.publications.megatron import runs_out as overflows
from benchmarks.publications.memory import runs_out
from benchmarks.publications.parts import is_of_parts, parts
from benchmarks.publications.plots import scatter
from benchmarks.publications.prediction import Outcome, outcomes
from benchmarks.publications.rows import Row
from benchmarks.publications.strategies import PROFILES
from benchmarks.publications.tables import read_table

STORE = Path.home() / ".cache" / "autopar" / "published"


def table_and_count(specified: str) -> tuple[str, int | None]:
    """Return the path of a table, and how many of its rows to predict; None: all."""
    path, _, count = specified.rpartition(":")
    return (path, int(count)) if path and count.isdecimal() else (specified, None)


def fails(outcome: Outcome) -> bool:
    """Return whether a run is predicted to run out of memory, by what its source counts."""
    return overflows(outcome) if outcome.row.source == BLOOM else runs_out(outcome)


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the rows of tables, and print how well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", help="CSV files; TABLE.csv:60 is sixty of its rows, the same every time")
    parser.add_argument("--cells", type=int, help="of each table the rows of so many models on so many GPUs")
    parser.add_argument("--successful", action="store_true", help="leave out runs that ran out of memory")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--plot", help="write a scatter plot to this PNG")
    parser.add_argument("--jobs", type=int, default=1, help="processes that plan")
    parser.add_argument("--whole", action="store_true", help="plan all layers of each model")
    parser.add_argument("--store", type=Path, default=STORE, help="folder in which predictions are kept")
    parser.add_argument("--profile", action="append", default=[], metavar="DEVICE=PROFILE", help="another profile")
    parser.add_argument("--shipped", action="store_true", help="profiles as they come, without fitted machines")
    parser.add_argument("--default", action="store_true", help="no variants of profiles, however a row ran")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    contradictions: list[Contradiction] = []
    for table, count in map(table_and_count, given.tables):
        if is_of_parts(table):
            print(f"{report.memory_parts(parts(table, load('a100')))}\n")
            continue
        whole = read_table(table)
        contradictions += contradicted(whole)
        read = [row for row in whole if not (given.successful and row.out_of_memory)]
        if given.cells:
            read = of_cells(read, given.cells, FEWEST_RUNS)
        rows += by_both_conventions(sampled(read, count))
    profiles = PROFILES | dict(each.split("=", 1) for each in given.profile)
    known: dict[str, Hardware] = {}

    def hardware_of(row: Row) -> Hardware:
        name = profiles[row.device] + ("" if given.default else machines.variant_of(row))
        if name not in known:
            known[name] = load(name)
        return known[name] if given.shipped else machines.hardware_of(row, known[name])

    def progress(done: int, of: int) -> None:
        print(f"\r{done} of {of} planned", end="" if done < of else "\n", file=sys.stderr, flush=True)

    if not rows:
        return
    found = outcomes(rows, hardware_of, given.jobs, given.store, given.whole, progress)
    command = shlex.join(sys.argv[1:] if arguments is None else arguments)
    print(f"python -m benchmarks.published {command}")
    print(f"date {datetime.date.today()}, torch {torch.__version__}, {len(rows)} rows\n")
    made, undisputed = cells(found, fails), ()
    if contradictions:
        undisputed = cells(report.without(found, contradictions), fails)
    for text in (
        report.rows(found) if given.rows else "",
        report.times(found, contradictions),
        report.contradicted_runs(contradictions),
        report.memory(found),
        report.golden(found),
        report.bloom(found),
        report.order_of_schedules(found),
        report.choices(made, undisputed),
        report.reasons(found),
    ):
        if text:
            print(f"{text}\n")
    if given.plot:
        scatter(found, given.plot)


if __name__ == "__main__":
    main()
