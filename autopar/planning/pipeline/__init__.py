"""Plans for a mesh with a pipeline axis.

Decides where the model is cut, which schedule runs, and has every stage planned on the other axes. Runs nothing.
"""
