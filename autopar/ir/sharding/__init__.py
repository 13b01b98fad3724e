"""The vocabulary of sharding: mesh, layout, rule, operation, annotation.

Decides how layouts of tensors and splits of operations are written down. Knows no operation by name, and
nothing of costs or of how anything is chosen.
"""
