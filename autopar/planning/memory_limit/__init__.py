"""Plans within a memory limit: the moments at which it binds, the best plan within it, and the least peak of any."""
