"""`autopar bench`: strategies and baselines trained in turns, beside what was predicted of them.

Decides how contestants are measured. Knows plans and modules from outside only, as a user does.
"""
