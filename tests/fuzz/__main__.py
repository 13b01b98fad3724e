"""`python -m tests.fuzz --cases N --seed S --jobs J`: N cases from seed S on; exits with 1 where one is bad."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter, defaultdict

import tabulate

from tests.fuzz.campaign import run_campaign
from tests.fuzz.case import draw_case
from tests.fuzz.shrink import shrink
from tests.fuzz.trial import judge
from tests.support.simulation.outcome import BAD, GOOD, Outcome

MEANING = {
    "equal": "trains as one process does",
    "refused": "an AutoparError says why not",
    "unusable": "one process fails, or computes inf or nan",
    "wrong": "other numbers than one process",
    "internal": "an error that is not autopar's own",
    "hang": "takes longer than a case may",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=120.0, help="that a case may take")
    parser.add_argument("--shrink", type=int, default=5, help="of how many causes the first case is made smaller")
    requested = parser.parse_args()
    logging.disable(logging.WARNING)

    start, counts = time.monotonic(), Counter()
    causes: defaultdict[str, list[tuple[int, Outcome]]] = defaultdict(list)
    refusals: Counter[str] = Counter()
    for seed, outcome in run_campaign(
        range(requested.seed, requested.seed + requested.cases), requested.jobs, requested.seconds
    ):
        counts[outcome.kind] += 1
        if outcome.is_bad:
            causes[outcome.cause].append((seed, outcome))
            print(f"seed {seed}: {outcome.kind}: {outcome.text}", flush=True)
        if outcome.kind == "refused":
            refusals[outcome.text.partition(":")[0]] += 1
        if counts.total() % 200 == 0:
            print(
                f"{counts.total()} cases, {time.monotonic() - start:.0f} s: {dict(counts)}", file=sys.stderr, flush=True
            )

    total = counts.total()
    rows = [(kind, counts[kind], f"{counts[kind] / total:.1%}", MEANING[kind]) for kind in (*GOOD, *BAD)]
    print(tabulate.tabulate(rows, ("outcome", "cases", "share", "")))
    print(f"refused by {', '.join(f'{name} {count}' for name, count in refusals.most_common()) or 'none'}")
    print(f"seeds {requested.seed} to {requested.seed + requested.cases - 1} in {time.monotonic() - start:.0f} s")
    for number, (cause, found) in enumerate(sorted(causes.items(), key=lambda each: -len(each[1]))):
        print(f"\n{cause}: {len(found)} cases, seeds {', '.join(str(seed) for seed, _ in found[:8])}")
        seed, outcome = found[0]
        print("\n".join(outcome.details.splitlines()[-6:]))
        if number < requested.shrink and outcome.kind != "hang":
            small = shrink(draw_case(seed), lambda case, kind=outcome.kind: judge(case, requested.seconds).kind == kind)
            print(f"{judge(small, requested.seconds).text}\n{small!r}")
    return int(bool(causes))


if __name__ == "__main__":
    sys.exit(main())
