"""What a call of a compiled module returns, and how gradients enter by it from outside."""

from __future__ import annotations
