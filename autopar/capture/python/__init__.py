"""What a forward does beside computing with tensors, while it is traced: Python state, random sources, hooks.

Decides what of it is recorded, so that a change is seen, what becomes a call of the graph, and what is refused. Knows
nothing of passes, layouts or plans.
"""
