"""Problem in, choices with a proven bound out.

Decides which choices are cheapest. Knows nothing of torch, layouts or programs: nodes, edges, numbers.
"""
