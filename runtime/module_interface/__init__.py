"""Module interface of a compiled module: to other code it is the model, by its class, signature and methods.

Also refuses what such code must not do with it. Knows nothing of plans and graphs.
"""
