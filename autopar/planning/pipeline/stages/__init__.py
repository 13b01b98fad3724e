"""Stages of a pipeline: where a model may be cut, where it is cut, and the stages themselves.

Knows the costs of blocks, and nothing of how they were planned.
"""
