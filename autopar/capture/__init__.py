"""Capture of an `nn.Module` as a `Program`: export, normalize, guard.

Decides what the graph is that everything after it plans and runs. Knows nothing of meshes, layouts or costs.
"""
