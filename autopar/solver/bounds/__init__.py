"""Treewidth too high for elimination: bounds by messages between nodes and edges, prices of memory, good solutions."""
