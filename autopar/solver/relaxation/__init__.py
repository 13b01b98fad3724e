"""Graphs too wide for elimination: bounds by copies of nodes that may differ, levelled, and good solutions."""
