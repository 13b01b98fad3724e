"""Files that commands write."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import InputError


def write_files(*files: tuple[str | None, Callable[[str], None]]) -> None:
    """Write each file that has a path, and say so; InputError for one that cannot be written."""
    for path, write in files:
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise InputError(f"the plan cannot be saved: {error}; give a file that can be written.") from error
            print(f"\nsaved in {path}")
