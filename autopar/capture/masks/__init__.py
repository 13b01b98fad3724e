"""Attention masks that a model makes of positions: found in its graph, and written as expressions."""
