"""Bounds for graphs that are too wide: copies of nodes may differ, and what that gains is levelled out of them."""
