"""Costs of layouts: hardware, prices, candidate strategies, memory, the tasks of a step, and the plan as a value."""
