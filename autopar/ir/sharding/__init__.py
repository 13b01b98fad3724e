"""The vocabulary of sharding: mesh, layout, rule, operation, annotation.

Decides what can be said about where a tensor lies and how an operation may be split. Knows no operation by name, and
nothing of costs or of how anything is chosen.
"""
