"""Questions to a plan that need what it was made from: explain, what_if, verify, diff.

Decides nothing: it answers. Knows nothing of ranks.
"""
