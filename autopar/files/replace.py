"""A file is replaced at once or not at all: what is new is complete on the disk before it takes the name."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from autopar.errors import InputError


def replace_text(path: str | Path, text: str) -> None:
    """Write text, in UTF-8, as `replace_bytes` does."""
    replace_bytes(path, text.encode())


def replace_bytes(path: str | Path, content: bytes) -> None:
    """Write where a file may be already; that one stays as it was where writing fails.

    A link is followed, and what is no ordinary file, such as /dev/stdout, is written to as it is. Raises OSError,
    and InputError for what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a {type(path).__name__} is no path; give the name of a file.")
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        if target.exists():
            draft.chmod(target.stat().st_mode & 0o777)
        draft.replace(target)
    except BaseException:
        draft.unlink()
        raise
