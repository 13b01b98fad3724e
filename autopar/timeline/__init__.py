"""When everything of a step runs: the tasks of a plan's step, as the runtime issues them, and their simulation.

Decides what runs beside what. Knows nothing of who chooses, nor how a timeline is shown.
"""
