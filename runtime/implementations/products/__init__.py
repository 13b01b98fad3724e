"""Matmuls overlapped with their collectives, or on a tile of the weight at a time."""
