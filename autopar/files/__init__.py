"""Files: text that takes the place of a file at once, JSON that is read within bounds, and schemas of it.

Decides which JSON is valid before anything is built from it. Knows no plan and no profile: their schemas stand with
them.
"""
