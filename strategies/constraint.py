"""`autopar.constrain`: an identity that only carries a pin. Any dim may be split; partial values pass."""

from __future__ import annotations

from autopar.strategies.notation import Entry

BY_NAME: dict[str, Entry] = {"autopar.constrain.default": "~... -> ..."}
"""By the name that the operation prints: its module lies above this one and need not be imported."""
