"""Options of a plan in groups: frozen values that check themselves, read without PyTorch.

One field with its docstring defines an option: its type, default, check, flag of the command line and help text.
"""
