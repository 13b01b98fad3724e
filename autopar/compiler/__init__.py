"""`compile` and `plan` behind the api: capture, plan, rewrite, run.

Decides in which order that happens, and what ranks must agree on. Knows no operation, no cost and no layout by itself.
"""
