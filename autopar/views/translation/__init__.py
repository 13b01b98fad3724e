"""A plan in the words of Hugging Face, torch and torchtitan, for those who do not run autopar.

Splits that they cannot express are named, and computed whole there. Nothing here changes a plan.
"""
