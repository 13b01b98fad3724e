"""Problem in, choices with a proven bound out.

Decides which choices are cheapest. Knows nothing of layouts or programs, and one kernel of torch
(`elimination.min_plus`): nodes, edges, numbers.
"""
