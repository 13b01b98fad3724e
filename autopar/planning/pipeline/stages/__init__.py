"""Stages of a pipeline: where a model may be cut, where it is cut, and its pieces.

Knows the costs of blocks, and nothing of how they were planned.
"""
