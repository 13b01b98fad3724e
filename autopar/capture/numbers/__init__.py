"""Tensors in the place of numbers among a model's inputs: two programs that compute the same for every value.

Does not decide when they are needed, and knows nothing of meshes or ranks.
"""
