"""Tasks on streams, and when each runs: the simulated timeline of a step.

Decides what runs beside what. Knows nothing of programs, plans or torch.
"""
