"""Graphs too wide for elimination: bounds by messages between nodes and edges, and good solutions."""
