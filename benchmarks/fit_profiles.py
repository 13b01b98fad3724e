"""Fits what GPUs reach, and what frameworks and machines add, to steps that others measured, and with groups left out.

Left out are whole models, and whole numbers of nodes.

    python -m benchmarks.fit_profiles a100 vtrain_a100_single_node.csv vtrain_a100_multi_node.csv papers.csv
    python -m benchmarks.fit_profiles h100 nanotron_h100.csv papers.csv --sample 60 --most 2000
    python -m benchmarks.fit_profiles h100 nanotron_h100.csv --machine nanotron   only what this machine adds

Numbers of the device are the same for all rows, `launch_s` for those of a framework, links and lateness for those of a
machine (`publications.machines`); nothing is fitted to a row. Steps are priced by `publications.ledger`. Logarithms of
predicted over measured seconds are made small by Gauss and Newton's method, in which rows that are far off count less,
and numbers stay near where they begin unless rows say otherwise. Folds are fitted on the slopes at the numbers of all
rows. `benchmarks.published` says what autopar then predicts.
"""

from __future__ import annotations

import argparse
import datetime
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import AutoparError
from autopar.hardware.load import load
from autopar.hardware.profile import Hardware
from benchmarks.publications.folds import both, sampled
from benchmarks.publications.ledger import RowLedger
from benchmarks.publications.machines import VTRAIN_BYTES_PER_S, Machine, machine_name
from benchmarks.publications.repeated import NotRepeated
from benchmarks.publications.rows import Row
from benchmarks.publications.strategies import PROFILES, Unexpressed
from benchmarks.publications.tables import read_table

DEVICE = {"product": 0.75, "attention": 0.4, "length": 200.0, "elementwise": 0.8}
"""Shares of the peak FLOP/s that products and attention reach, queries at which this is half, share of bandwidth."""
NOT_FITTED = "nanotron, no NVLink"  # whose node and messages `machines` says
MACHINE = ("late in node", "late in network", "network", "latency", "gathered")
BEGIN = {"nanotron": (1e-6, 4.5e-4, 30e9, 3.0, 0.6), "nanotron, late hosts": (3.6e-4, 2.7e-3, 21e9, 10.0, 0.9)}
"""Of a machine seconds of lateness, bytes/s of the network, times the latencies of NCCL's model, and the share of the
network that gathers and reduce-scatters reach."""
MOST = {"product": 0.95, "attention": 0.95, "elementwise": 1.0}
MOST |= {f"gathered {name}": 1.0 for name in BEGIN}
FIRM = {"product": 1.0, "elementwise": 0.6, "length": 0.5, "attention": 0.3}
"""How firmly a number stays where it begins, in rows that are 100% off."""
LOOSE = 0.25  # of all others
STEPS, STEP = 4, 0.05
FAR, FARTHEST = 0.1, 0.6  # an error from which on rows count less; the most that a step moves a logarithm
Numbers = Mapping[str, float]


def begin(rows: Sequence[Row], device: Numbers = DEVICE) -> dict[str, float]:
    """What is fitted to some rows, where it begins."""
    found = dict(device)
    for name in sorted({machine_name(row) for row in rows}):
        found[f"launch {'nanotron' if name.startswith('nanotron') else name.split()[0]}"] = 3e-5
        if name.startswith("nanotron"):
            found |= {f"{what} {name}": value for what, value in zip(MACHINE, BEGIN[name], strict=True)}
    return found


def numbers_of(profile: Hardware) -> dict[str, float]:
    """What a profile says of its device, in the numbers that are fitted."""
    return {
        "product": profile.product_efficiency,
        "attention": profile.product_efficiency * profile.attention_efficiency,
        "length": profile.attention_length,
        "elementwise": profile.elementwise_bytes_per_s / profile.memory_bytes_per_s,
    }


def hardware_of(numbers: Numbers, row: Row, profile: Hardware) -> Hardware:
    """The profile with fitted numbers, on the machine of a row."""
    name = machine_name(row)
    machine = Machine(numbers[f"launch {'nanotron' if name.startswith('nanotron') else name.split()[0]}"])
    if name in BEGIN:
        in_node, between, *network = (numbers[f"{each} {name}"] for each in MACHINE)
        machine = Machine(machine.launch_s, (in_node, between), *network)
    elif name == "vtrain several nodes":
        machine = replace(machine, network_bytes_per_s=VTRAIN_BYTES_PER_S)
    device = replace(
        profile,
        product_efficiency=numbers["product"],
        attention_efficiency=min(1.0, numbers["attention"] / numbers["product"]),
        attention_length=numbers["length"],
        elementwise_bytes_per_s=numbers["elementwise"] * profile.memory_bytes_per_s,
    )
    return machine.of(device)


@dataclass(frozen=True, slots=True)
class Fit:
    """Rows whose steps can be priced on other numbers."""

    ledgers: Sequence[RowLedger]
    profiles: Mapping[str, Hardware]
    """Device → the profile that numbers are put into."""
    fixed: Numbers
    """Numbers that are not fitted."""

    def errors(self, numbers: Numbers, of: Sequence[int]) -> np.ndarray:
        """Logarithms of predicted over measured seconds."""
        found = []
        for each in (self.ledgers[n] for n in of):
            hardware = hardware_of({**self.fixed, **numbers}, each.row, self.profiles[each.row.device])
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
    parser.add_argument("--machine", help="fit only what this machine adds to the profile as it is")
    given = parser.parse_args(arguments)
    read = [
        each
        for table in given.tables
        for each in read_table(table)
        if each.seconds
        and PROFILES.get(each.device, "").startswith(given.kind)
        and _is_of(each, given.machine)
        and (each.pp == 1 or each.pp * each.chunks * each.accumulation <= given.most)
    ]
    sources = dict.fromkeys(each.source for each in read)
    rows = [
        row for source in sources for row in sampled([each for each in read if each.source == source], given.sample)
    ]
    profiles = {row.device: Machine(straggling_s=(1e-9, 1e-9)).of(load(PROFILES[row.device])) for row in rows}
    ledgers = []
    warnings.simplefilter("ignore")  # what strategies repeat or leave whole, the sources' do, too
    for row in rows:
        try:
            ledgers.append(RowLedger.of(row, profiles[row.device]))
        except (Unexpressed, NotRepeated, AutoparError):
            continue
    kept = numbers_of(load(given.kind)) if given.machine else {}
    fit = Fit(ledgers, profiles, kept)
    first = begin(rows, {} if given.machine else DEVICE)
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
        fitted, asked = list(fold.fitted), list(fold.held_out)
        move = nearest(off[fitted], slopes[fitted], here - start, firm)
        left_out.setdefault(name, off.copy())[asked] = off[asked] + slopes[asked] @ move
    for name, errors in left_out.items():
        _say(f"{name} left out", ledgers, errors)


def _is_of(row: Row, machine: str | None) -> bool:
    """Whether a row is fitted: of one machine, or of all that are."""
    return machine_name(row) != NOT_FITTED if machine is None else machine_name(row) == machine


def _say(what: str, ledgers: Sequence[RowLedger], off: np.ndarray) -> None:
    print(f"\n{what}:")
    names = np.array([machine_name(each.row) for each in ledgers])
    for name in sorted(set(names)):
        errors = np.expm1(off[names == name])
        print(f"  {name:28} {len(errors):4}  MAPE {np.abs(errors).mean():6.1%}  median {np.median(errors):+.1%}")


if __name__ == "__main__":
    main()
