"""What a user says about a model → masks over menus, or the reason why not.

Decides which choices are left by annotations, foreign plans and presets. Knows nothing of memory limits or solvers.
"""
