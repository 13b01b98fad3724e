"""Equal layers of a model are traced once: which are equal, and what stands for the others until they are inlined.

Decides when one trace says what another would. Knows nothing of what the layers compute.
"""
