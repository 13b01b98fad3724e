"""Views of a plan: text, HTML, traces.

Decides how a plan looks. Takes plans only: nothing of what they were made from.
"""
