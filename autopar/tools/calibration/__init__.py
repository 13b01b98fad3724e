"""Measuring a machine into a hardware profile.

Decides what is measured and how numbers are fitted to it. Knows nothing of plans.
"""
