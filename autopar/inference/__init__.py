"""What is run without training: a forward alone, and generation of tokens with a cache of keys and values.

Decides where the cache lies and in which order prompts and tokens are run. Knows no operation and no cost by itself.
"""
