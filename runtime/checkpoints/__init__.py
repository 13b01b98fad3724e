"""Checkpoints in files that others read, too: safetensors as Hugging Face lays them out.

Decides which rank reads and writes what. Knows nothing of plans and graphs.
"""
