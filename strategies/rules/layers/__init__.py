"""The tables of what networks are made of: attention, convolutions, lookups, losses, normalisations, recurrences.

What works on arrays of any meaning (products, reductions, views …) lies above. Knows no more than the tables there.
"""
