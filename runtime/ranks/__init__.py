"""Processes: start them, agree on something, fail together.

Knows process groups, and nothing of models or plans.
"""
