"""The tables: ATen overload → rule, one file per family of operations.

Decides along which factors an operation may be split. Knows nothing of meshes, costs or other operations.
"""
