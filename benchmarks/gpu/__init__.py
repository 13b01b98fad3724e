"""What one GPU can show of autopar, in minutes: `python -m benchmarks.gpu`, or `make gpu` with its environment."""
