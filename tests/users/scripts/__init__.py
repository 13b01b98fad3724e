"""Training scripts, each a function from a `Setting` to what it has to show; one file per field of use."""
