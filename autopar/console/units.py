"""Bytes, seconds and shares as people write them."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from autopar.errors import InputError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_COUNT = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?(?:e[0-9]{1,2})?)\s*([kKmMbBtT]?)\s*")
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]+)\s*")


def parse_bytes(size: str | int) -> int:
    """Return the bytes from a number or a text with a unit.

    >>> parse_bytes("8GB"), parse_bytes("1.5 MiB"), parse_bytes(100)
    (8000000000, 1572864, 100)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if not match or match.group(2).upper() not in UNITS:
        raise InputError(f'{size!r} is no size; write a number and a unit, such as "8GB" or "512MiB".')
    return round(Fraction(match.group(1)) * UNITS[match.group(2).upper()])


def parse_count(count: str | float) -> float:
    """Return a number of things from a number or a text with a unit.

    >>> parse_count("1T"), parse_count("300B"), parse_count(2e9)
    (1000000000000.0, 300000000000.0, 2000000000.0)
    """
    if isinstance(count, int | float) and not isinstance(count, bool) and 0 < count < math.inf:
        return float(count)
    match = _COUNT.fullmatch(count) if isinstance(count, str) else None
    if not match or float(match.group(1)) == 0:
        raise InputError(f'{count!r} is no number of tokens; write a number above 0, such as 3e11, "300B" or "1T".')
    return float(match.group(1)) * COUNTS[match.group(2).upper()]


def format_bytes(count: float) -> str:
    """Return the bytes as text, in powers of ten.

    >>> format_bytes(8_000_000_000)
    '8.00 GB'
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return the seconds as text.

    >>> format_seconds(0.0123)
    '12.30 ms'
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def format_count(count: float) -> str:
    """Return a number of things as text.

    >>> format_count(8_030_261_248), format_count(120)
    ('8.03 B', '120')
    """
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f}"


def format_share(share: float) -> str:
    """Return a share as per cent, of which something is left to see however small it is.

    >>> format_share(0.0325), format_share(1.5e-5), format_share(0.0)
    ('3.25%', '0.0015%', '0.00%')
    """
    return f"{share:.2%}" if share == 0 or abs(share) >= 1e-4 else f"{100 * share:.2g}%"
