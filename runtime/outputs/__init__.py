"""Outputs of a compiled module's call, and the gradients that enter by them from outside."""

from __future__ import annotations
