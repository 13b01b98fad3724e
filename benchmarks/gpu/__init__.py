"""Benchmarks of autopar on one GPU, in minutes: `python -m benchmarks.gpu`, or `make gpu` with its environment."""
