"""The examples of docs/examples: on two ranks as they are, and on one process as they were before autopar."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.test_house import ROOT

EXAMPLES = ROOT / "docs" / "examples"
CHANGED = re.compile(r"^(.*)  # (?:new|was: (.*))$")


def before(text: str) -> tuple[str, int]:
    """A script without autopar, and how many lines of it autopar changes."""
    lines, changed = [], 0
    for line in text.splitlines():
        found = CHANGED.match(line)
        changed += found is not None
        if found is None or found[2]:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(line if found is None else indent + found[2])
    return "\n".join(lines) + "\n", changed


def on_two_ranks(name: str, *arguments: object) -> Any:
    """Run an example on two ranks with torchrun, and return the last losses that it prints."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    return _run(*torchrun, str(EXAMPLES / name), *map(str, arguments))


def alone(name: str, folder: Path, *arguments: object) -> tuple[Any, int]:
    """Run the script from which an example is made on one process.

    Returns the last losses that it prints, and the number of lines that the example changes.
    """
    text, changed = before((EXAMPLES / name).read_text())
    assert "autopar" not in re.sub(r'""".*?"""', "", text, count=1, flags=re.S)
    script = folder / name
    script.write_text(text)
    return _run(str(script), *map(str, arguments)), changed


def environment() -> dict[str, str]:
    """Return the environment of this process with the sources of this checkout and one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _run(*command: str) -> Any:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses_in(done.stdout)


def losses_in(printed: str) -> Any:
    """The last object of JSON that begins with losses; what ranks print at once may share a line."""
    return json.JSONDecoder().raw_decode(printed, printed.rindex('{"losses"'))[0]
