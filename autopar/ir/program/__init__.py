"""The captured program as a value, and what can be read off it without a mesh.

Decides what a call saves for its backward, which calls belong to one layer, and what has effects beyond its result.
Knows nothing of meshes, layouts, costs, or how the program was captured.
"""
