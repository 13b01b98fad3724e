"""What campaigns have found, as programs of their own: name → (case, outcome that it must have)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.case import Case

FOUND: Mapping[str, tuple[Case, str]] = {}
