"""Space, pins and limit → Plan.

Decides which plan is the best one on a mesh, and on which mesh. Knows nothing of pipelines, and runs nothing.
"""
