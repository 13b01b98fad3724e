"""Effects of a forward outside tensor computation, observed during tracing: Python state, random sources, hooks.

Decides what of it is recorded, so that a change is seen, what becomes a call of the graph, and what is refused. Knows
nothing of passes, layouts or plans.
"""
