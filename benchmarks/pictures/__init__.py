"""Pictures of the documentation, drawn from plans and from result files: `python -m benchmarks.pictures`."""
