"""The tables of what networks are made of: attention, convolutions, lookups, losses, normalisations, recurrences.

Rules for arrays of any meaning (products, reductions, views …) lie above. Knows no more than the tables there.
"""
