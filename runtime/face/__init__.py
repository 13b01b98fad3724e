"""What a compiled module is to code that does not know it: the model, by its class, its signature and its methods.

Also what such code must not do with it. Knows nothing of plans and graphs.
"""
