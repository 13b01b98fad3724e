"""Operators of autopar's own, in which captured programs say what ATen has no word for that can be divided."""
