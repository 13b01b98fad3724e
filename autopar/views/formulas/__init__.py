"""The costs of a plan in symbols (batch, sequence, axis sizes), and re-pricing with other values of them.

Decides nothing: its formulas come to the numbers that `cost` and `memory` give. Knows nothing of how plans are found.
"""
