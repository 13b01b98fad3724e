"""Exact optima of problems without a memory row: orders of elimination, the sums they share, and min-marginals."""
