"""Attention by blocks: the queries of this rank with keys that are whole, split, or travel around a ring of ranks."""
