"""The entry point: parse the command line, import the command, run it, and turn errors into one line and a status."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopar.cli.flags import in_shell_terms
from autopar.cli.parser import parser
from autopar.errors import AutoparError

FAILED = 2
"""The exit status of an error."""
INTERRUPTED = 130  # exit status of shells: 128 + SIGINT
SHOW_TRACEBACK = "AUTOPAR_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors go to stderr without a traceback of ours."""
    options = parser().parse_args(argv)
    try:
        module, _, function = options.command.partition(":")
        with _warnings_of_commands(vars(options)):
            status = getattr(importlib.import_module(module), function)(options)
        sys.stdout.flush()
    except AutoparError as error:
        print(f"autopar: {in_shell_terms(str(error), vars(options))}", file=sys.stderr)
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(SHOW_TRACEBACK):
            raise
        print(f"autopar: {_internal(error)}", file=sys.stderr)
    else:
        return status
    return FAILED


@contextmanager
def _warnings_of_commands(options: dict[str, Any]) -> Iterator[None]:
    """Show a warning at the script of this command, whose line says nothing to a user, as one line without it."""
    show = warnings.showwarning

    def show_in_shell_terms(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any, **keywords: Any
    ) -> None:
        if filename != sys.argv[0]:
            return show(message, category, filename, *rest, **keywords)
        print(f"autopar: warning: {in_shell_terms(str(message), options)}", file=sys.stderr)

    warnings.showwarning = show_in_shell_terms
    try:
        yield
    finally:
        warnings.showwarning = show


def _internal(error: Exception) -> str:
    """Return what to say of an error that nobody meant to raise."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"internal error: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno}). This is a "
        f"mistake of autopar's: report it with the traceback that {SHOW_TRACEBACK}=1 shows."
    )
