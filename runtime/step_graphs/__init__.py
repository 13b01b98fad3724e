"""CUDA graphs of whole training steps: which steps may be one, and capture and replay.

It knows modules by the few methods that a step needs (`step.Stepping`), and nothing of plans but what a graph forbids.
"""
