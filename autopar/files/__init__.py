"""Files: text that takes the place of a file at once, JSON that is read within bounds, and schemas of it.

Decides what JSON may say before anything is made of it. Knows no plan and no profile: their tables stand beside them.
"""
