"""Seconds and bytes of an operation, a message, a move, a reshard and an optimizer's step.

Decides what a choice costs. Knows nothing of who chooses, nor what else is chosen.
"""
