"""One flat graph out of an exported one: regions, kept functions and repeated layers become plain calls.

Decides what stands in the place of what `torch.export` has not recorded as a call. Knows nothing of what is made of it.
"""
