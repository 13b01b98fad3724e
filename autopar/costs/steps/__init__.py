"""The tasks of a step under a plan's choices, as the runtime issues them.

Decides which collectives are waited for, and when. Knows nothing of who chooses.
"""
