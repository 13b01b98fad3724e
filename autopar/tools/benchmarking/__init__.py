"""`autopar bench`: strategies and baselines trained in turns, compared with predictions.

Decides how contestants are measured. Knows plans and modules from outside only, as a user does.
"""
