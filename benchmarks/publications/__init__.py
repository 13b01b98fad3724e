"""Training steps that others have measured, planned as they ran them, compared with autopar's predictions."""
