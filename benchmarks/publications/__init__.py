"""Training steps that others have measured, planned as they ran them, beside what autopar predicts."""
