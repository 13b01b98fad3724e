"""Process groups by axis name, moves between layouts as autograd functions, gradient and weight buckets.

Decides which messages a rank sends. Knows nothing of graphs.
"""
