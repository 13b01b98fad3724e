"""Draw the pictures of the documentation, all data from plans and result files: docs/images/*.svg.

python -m benchmarks.pictures                      all of them, a minute or two
python -m benchmarks.pictures timeline pipeline    some
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.pictures import charts, layouts, scatters

FOLDER = Path(__file__).parents[2] / "docs" / "images"
PICTURES: dict[str, Callable[[Path], None]] = {
    **{f"layouts-{name}": functools.partial(layouts.draw, name) for name in layouts.STRATEGIES},
    "memory-over-a-step": charts.memory_over_a_step,
    "timeline": charts.timeline,
    "pipeline": charts.pipeline,
    "predicted-and-measured": scatters.small_models,
    "published": scatters.published,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the requested pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write them (docs/images)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in PICTURES]
    if unknown:
        parser.error(f"no picture {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    for name in given.names or PICTURES:
        path = given.folder / f"{name}.svg"
        PICTURES[name](path)
        print(path, flush=True)


if __name__ == "__main__":
    main()
