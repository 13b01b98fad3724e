"""Program and choices → the graph that every rank runs.

Decides which node calls which function. Chooses nothing: the plan has.
"""
