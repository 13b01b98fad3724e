"""Inference: a forward alone, and generation of tokens with a cache of keys and values.

Chooses the layout of the cache and the order in which prompts and tokens are run. Knows no operation and no cost by
itself.
"""
