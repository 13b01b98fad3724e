"""Functions that replace an ATen call where splitting it needs more than resharding.

Each computes what the ATen call would on the whole tensors. A rule names it (see `autopar.ir.sharding.rule`).
"""
