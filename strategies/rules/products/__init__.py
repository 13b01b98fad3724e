"""Matmuls in parts: in chunks overlapped with their collectives, or a tile of the weight at a time."""
