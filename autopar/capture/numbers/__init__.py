"""Tensors in the place of numbers among a model's inputs: two programs that compute the same for every value.

Decides nothing about when that is asked, and knows nothing of meshes or ranks.
"""
