"""Problem in, choices with a proven bound out.

Decides which choices are cheapest. Knows nothing of layouts or programs, and of torch one kernel (`elimination.min_plus`): nodes, edges, numbers.
"""
