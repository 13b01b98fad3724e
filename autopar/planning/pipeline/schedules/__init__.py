"""Schedules of a pipeline: what there are, how long they take, which one is recommended.

Knows the seconds of stages, and nothing of models.
"""
