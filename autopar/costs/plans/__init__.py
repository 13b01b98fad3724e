"""Plans as values, and the answers they give.

A plan holds every choice with its predictions; it is made, saved, compared and loaded without torch. Functions that
show or re-plan a plan are bound in `views`, the one seam to the packages above. Nothing here knows how a plan was
found.
"""
