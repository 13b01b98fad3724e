"""JSON read from a file that may hold anything: within bounds, without numbers that JSON has not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from autopar.files.schema import Malformed

MAX_CHARACTERS = 2**27


def read_text(path: str | Path) -> str:
    """Return the text of a file; Malformed where there is none, or none that is text."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise Malformed(f"it cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise Malformed(f"it is no text (byte {error.start} is no UTF-8)") from error
    except (TypeError, ValueError) as error:  # a path with a zero in it, or something else than a path
        raise Malformed(f"it is no path ({error})") from error
    if len(text) > MAX_CHARACTERS:
        raise Malformed(f"it has more than {MAX_CHARACTERS} characters")
    return text


def read_json(text: str) -> Any:
    """Parse JSON text.

    Raises Malformed if the text is not JSON, is nested too deeply, or has a number that no float can represent.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded)
    except Malformed:
        raise
    except RecursionError as error:
        raise Malformed("the text is no JSON that can be read (it is nested too deep)") from error
    except (TypeError, ValueError) as error:
        raise Malformed(f"the text is no JSON ({error})") from error


def _refuse(word: str) -> NoReturn:
    raise Malformed(f"the text is no JSON (it says {word}; numbers are finite)")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise Malformed(f"the text has a number, {digits[:20]}, that is larger than any float")
    return number


def _bounded(digits: str) -> int:
    if len(digits) > 300:  # a float reaches 1.8e308
        raise Malformed(f"the text has a number of {len(digits)} digits, {digits[:10]}…, larger than any float")
    return int(digits)
