"""The passes of capture: one rewrite of the traced graph per file, and the graph that they edit.

A pass decides how one behaviour of modules is written in plain ATen calls. It knows nothing of other passes.
"""
