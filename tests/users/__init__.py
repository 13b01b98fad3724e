"""Training scripts as users write them, each compared with one process."""
