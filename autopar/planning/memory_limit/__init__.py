"""Plans within a memory limit: where the limit is met, which plan is the best there, and the least that any takes."""
