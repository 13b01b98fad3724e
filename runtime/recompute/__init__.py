"""Activation recomputation at run time.

Decides when a layer is computed again and with which random numbers. What is computed again, the plan says.
"""
