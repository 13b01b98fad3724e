"""The module that a user trains: parameters, inputs, outputs, state.

Decides how a rank's graph looks like an `nn.Module`. Knows nothing of how it was planned.
"""
