"""Rows of tokens, as routers and losses take them: their samples and positions kept apart, and as many as divide."""
