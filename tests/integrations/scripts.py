"""The examples of docs/examples: on two ranks as they are, and on one process as they were before autopar."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.test_house import ROOT

EXAMPLES = ROOT / "docs" / "examples"
CHANGED = re.compile(r"^(.*)  # (?:new|was: (.*))$")


def before(text: str) -> tuple[str, int]:
    """Return a script without autopar, and how many lines of it autopar changes."""
    lines, changed = [], 0
    for line in text.splitlines():
        found = CHANGED.match(line)
        changed += found is not None
        if found is None or found[2]:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(line if found is None else indent + found[2])
    return "\n".join(lines) + "\n", changed


def on_two_ranks(name: str, *arguments: object, folder: Path = ROOT) -> dict[str, Any]:
    """Run an example on two ranks with torchrun, and return the values that it prints."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    return _run(*torchrun, str(EXAMPLES / name), *map(str, arguments), folder=folder)


def alone(name: str, folder: Path, *arguments: object) -> tuple[dict[str, Any], int]:
    """Run the script from which an example is made on one process.

    Returns the values that it prints, and the number of lines that the example changes.
    """
    script, changed = written_before(name, folder)
    return _run(str(script), *map(str, arguments), folder=folder), changed


def written_before(name: str, folder: Path) -> tuple[Path, int]:
    """Write the script from which an example is made into the folder; also return how many lines autopar changes."""
    text, changed = before((EXAMPLES / name).read_text())
    assert "autopar" not in re.sub(r'""".*?"""', "", text, count=1, flags=re.S)
    script = folder / name
    script.write_text(text)
    return script, changed


def shown_here(script: str, folder: str) -> dict[str, Any]:
    """Run a script in this process, which may be a rank of a pool, and return the values that it prints."""
    ranks = dist.is_initialized()
    os.environ["WORLD_SIZE"] = str(dist.get_world_size() if ranks else 1)
    os.environ["RANK"] = str(dist.get_rank() if ranks else 0)
    printed = io.StringIO()
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        del os.environ["WORLD_SIZE"], os.environ["RANK"]
    return values_in(printed.getvalue())


def environment() -> dict[str, str]:
    """Return the environment of this process with the sources of this checkout and one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _run(*command: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return values_in(done.stdout)


def values_in(printed: str) -> dict[str, Any]:
    """Return the last list behind each word; what ranks print at once may share a line."""
    return {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+) (\[[^a-z]*\])", printed)}
