"""Lengths and batches that vary: which sizes inputs are padded to, how outputs are cut, whether padding changes them.

Decides nothing of how a padded call runs. Knows captured programs and layouts; neither plans nor process groups.
"""
