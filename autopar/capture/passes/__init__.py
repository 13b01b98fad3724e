"""The passes of capture: one rewrite of the traced graph per file, and the graph that they edit.

A pass decides how one thing that modules do is said in plain ATen calls. It knows nothing of the passes beside it.
"""
