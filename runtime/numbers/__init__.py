"""Numbers among the inputs that change: they become tensors of a graph, which then serves all their values.

Decides which numbers those are, and warns of others. Knows nothing of plans.
"""
