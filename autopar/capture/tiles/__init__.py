"""Losses and MLPs in tiles of rows: what of a traced model is taken so, and into how many."""
