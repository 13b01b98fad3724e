"""Training scripts as users write them, each beside one process."""
