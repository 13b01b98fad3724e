"""Fit the numbers of shipped profiles to steps that others measured, and report errors with whole groups left out.

Left out are whole models, and whole numbers of nodes.

    python -m benchmarks.fit_profiles a100 vtrain_a100_single_node.csv vtrain_a100_multi_node.csv papers.csv
    python -m benchmarks.fit_profiles h100 nanotron_h100.csv papers.csv --sample 60 --most 300
    python -m benchmarks.fit_profiles h100 nanotron_h100.csv --debug    what checks of collectives add

The numbers of a profile are the same for all rows; nothing is fitted to a row or to a source. Attention is not fitted:
its numbers are those of published curves. Rows run on what their sources say of them (`publications.machines`);
nanotron's whose collectives are checked are left out of a profile's fit. Steps are priced by `publications.ledger`.
Logarithms of predicted over measured seconds are made small by Gauss and Newton's method, in which rows that are far
off count less, and numbers stay near where they begin unless rows say otherwise. Folds are fitted on the slopes at the
numbers of all rows. `benchmarks.published --shipped` says what autopar then predicts.
"""

from __future__ import annotations

import argparse
import datetime
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.errors import AutoparError
from benchmarks.publications.folds import both, sampled
from benchmarks.publications.ledger import RowLedger
from benchmarks.publications.machines import CHECKED, VARIANTS, machine_name, variant_of
from benchmarks.publications.machines import hardware_of as on_machine
from benchmarks.publications.repeated import NotRepeated
from benchmarks.publications.rows import Row
from benchmarks.publications.strategies import PROFILES, Unexpressed
from benchmarks.publications.tables import read_table

DEVICE = {"product": 0.7, "elementwise": 0.7, "launch": 5e-5}
"""Shares of the peak FLOP/s and of the memory's bandwidth; seconds of a launch."""
NETWORK = {"late in network": 6e-4, "network": 0.74, "gathered": 0.5}
"""Seconds of lateness, share of the network that all collectives reach, and of that, what gathers and scatters do."""
CHECKS = {"check": 3.2e-4}
"""Seconds of the host for each rank of a collective's group."""
MOST = {"product": 0.95, "elementwise": 1.0, "network": 1.0, "gathered": 1.0}
FIRM = {"product": 1.0, "elementwise": 0.6}
"""Strength with which a fitted number is tied to its starting value, in units of rows with a 100% error."""
LOOSE = 0.25  # of all others
STEPS, STEP = 4, 0.05
FAR, FARTHEST = 0.1, 0.6  # an error from which on rows count less; the most that a step moves a logarithm
Numbers = Mapping[str, float]


def begin(rows: Sequence[Row], checked: bool = False) -> dict[str, float]:
    """Return the numbers that are fitted to some rows, where they begin."""
    if checked:
        return dict(CHECKS)
    return {**DEVICE, **(NETWORK if any(machine_name(row) == "nanotron" for row in rows) else {})}


def hardware_of(numbers: Numbers, row: Row, profile: Hardware) -> Hardware:
    """Return the profile with fitted numbers, on the machine of a row."""
    if "check" in numbers:
        return on_machine(row, replace(profile, collective_check_s=numbers["check"]))
    node, network = profile.links
    if "network" in numbers:
        share, gathered = numbers["network"], numbers["network"] * numbers["gathered"]
        reached = replace(network.efficiencies, all_reduce=share, all_gather=gathered, reduce_scatter=gathered)
        network = replace(network, efficiencies=reached, straggling_s=numbers["late in network"])
    attention = profile.product_efficiency * profile.attention_efficiency
    device = replace(
        profile,
        product_efficiency=numbers["product"],
        attention_efficiency=attention / numbers["product"],
        elementwise_bytes_per_s=numbers["elementwise"] * profile.memory_bytes_per_s,
        launch_s=numbers["launch"],
        links=(node, network),
    )
    return on_machine(row, device)


@dataclass(frozen=True, slots=True)
class Fit:
    """Rows whose steps can be priced on other numbers."""

    ledgers: Sequence[RowLedger]
    profiles: Mapping[str, Hardware]
    """Name → the profile that numbers are put into."""

    def errors(self, numbers: Numbers, of: Sequence[int]) -> np.ndarray:
        """Logarithms of predicted over measured seconds."""
        found = []
        for each in (self.ledgers[n] for n in of):
            hardware = hardware_of(numbers, each.row, self.profiles[_profile_of(each.row)])
            found.append(math.log(each.seconds(hardware) / (each.row.seconds or math.nan)))
        return np.array(found)

    def slopes(self, names: Sequence[str], here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The errors of all rows at logarithms of numbers, and by how much each of these moves them."""
        every = range(len(self.ledgers))
        off = self.errors(_numbers(names, here), every)
        moved = (here + STEP * (np.arange(len(names)) == column) for column in range(len(names)))
        columns = [(self.errors(_numbers(names, each), every) - off) / STEP for each in moved]
        return off, np.stack(columns, axis=1)


def nearest(off: np.ndarray, slopes: np.ndarray, away: np.ndarray, firm: np.ndarray) -> np.ndarray:
    """The move of logarithms that makes errors small; they are `away` from where they begin."""
    move = np.zeros(len(firm))
    for _ in range(20):
        weight = (1 + ((off + slopes @ move) / FAR) ** 2) ** -0.25
        left = np.vstack([slopes * weight[:, None], np.diag(firm)])
        right = np.concatenate([-off * weight, -firm * away])
        move = np.linalg.lstsq(left, right, rcond=None)[0]
    return move


def _numbers(names: Sequence[str], logarithms: np.ndarray) -> dict[str, float]:
    return {name: min(math.exp(value), MOST.get(name, math.inf)) for name, value in zip(names, logarithms, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, and print the numbers with their errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", help="how the profiles of the devices begin: a100, h100")
    parser.add_argument("tables", nargs="+", help="CSV files")
    parser.add_argument("--sample", type=int, help="of each source so many rows, the same every time")
    parser.add_argument("--most", type=float, default=math.inf, help="forwards of stages in the step of a row")
    parser.add_argument("--debug", action="store_true", help="fit what checks of collectives add to the profile")
    given = parser.parse_args(arguments)
    read = [
        each
        for table in given.tables
        for each in read_table(table)
        if each.seconds
        and PROFILES.get(each.device, "").startswith(given.kind)
        and _is_fitted(each, given.debug)
        and (each.pp == 1 or each.pp * each.chunks * each.accumulation <= given.most)
    ]
    sources = dict.fromkeys(each.source for each in read)
    rows = [
        row for source in sources for row in sampled([each for each in read if each.source == source], given.sample)
    ]
    profiles = {name: load(name) for name in dict.fromkeys(map(_profile_of, rows))}
    ledgers = []
    warnings.simplefilter("ignore")  # what strategies repeat or leave whole, the sources' do, too
    for row in rows:
        try:
            ledgers.append(RowLedger.of(row, _telling(profiles[_profile_of(row)])))
        except (Unexpressed, NotRepeated, AutoparError):
            continue
    fit = Fit(ledgers, profiles)
    first = begin(rows, given.debug)
    names, firm = list(first), np.array([FIRM.get(name, LOOSE) for name in first])
    start = here = np.log(list(first.values()))
    for _ in range(STEPS):
        off, slopes = fit.slopes(names, here)
        here = here + np.clip(nearest(off, slopes, here - start, firm), -FARTHEST, FARTHEST)
    off, slopes = fit.slopes(names, here)
    print(f"date {datetime.date.today()}, {len(ledgers)} of {len(rows)} rows\n")
    print("\n".join(f"{name:30} {value:.4g}" for name, value in _numbers(names, here).items()))
    _say("all rows fitted", ledgers, off)
    left_out: dict[str, np.ndarray] = {}
    for name, fold in both([each.row for each in ledgers]):
        fitted, requested = list(fold.fitted), list(fold.held_out)
        move = nearest(off[fitted], slopes[fitted], here - start, firm)
        left_out.setdefault(name, off.copy())[requested] = off[requested] + slopes[requested] @ move
    for name, errors in left_out.items():
        _say(f"{name} left out", ledgers, errors)


def _is_fitted(row: Row, checked: bool) -> bool:
    """Return whether a row is fitted: one whose collectives are checked, or all others."""
    return machine_name(row) == CHECKED if checked else variant_of(row) != VARIANTS[CHECKED]


def _profile_of(row: Row) -> str:
    """Return the name of the profile, in its variant, of a row."""
    return PROFILES[row.device] + variant_of(row)


def _telling(profile: Hardware) -> Hardware:
    """Return a profile without checks, by whose lateness tasks tell what they are (see `RowLedger.of`)."""
    return replace(
        profile, collective_check_s=0.0, links=tuple(replace(link, straggling_s=1e-9) for link in profile.links)
    )


def _say(what: str, ledgers: Sequence[RowLedger], off: np.ndarray) -> None:
    print(f"\n{what}:")
    names = np.array([machine_name(each.row) for each in ledgers])
    for name in sorted(set(names)):
        errors = np.expm1(off[names == name])
        print(f"  {name:28} {len(errors):4}  MAPE {np.abs(errors).mean():6.1%}  median {np.median(errors):+.1%}")


if __name__ == "__main__":
    main()
