"""Execution of a plan: collectives, implementations, the rewritten per-rank graph, the module that runs it."""

if __name__ != "autopar.runtime":
    raise ImportError(f"this package was imported as {__name__!r}; import autopar.runtime instead.")
