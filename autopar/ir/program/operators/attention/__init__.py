"""Attention by blocks on one device: kernels, the sum of their results, and masks worked out for a block."""
