"""The arrangements of a number of devices in axes, and the search for the one with the fastest plan.

Knows nothing of how the plan of a mesh is made.
"""
