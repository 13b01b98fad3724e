"""Activation recomputation at run time.

Decides when a layer is computed again and with which random numbers. The plan states what is computed again.
"""
