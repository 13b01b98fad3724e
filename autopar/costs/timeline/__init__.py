"""Tasks on streams, and when each runs: the simulated timeline of a step.

Decides which tasks overlap. Knows nothing of programs, plans or torch.
"""
