"""A plan in the words of Hugging Face, torch and torchtitan, for those who do not run autopar.

What their words cannot say is named, and computed whole there. Nothing here changes a plan.
"""
