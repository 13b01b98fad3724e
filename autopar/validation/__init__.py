"""Whether a rule is right: a call run whole, and in parts on ranks that are played in one process.

Knows rules and calls, and nothing of plans, costs or real ranks.
"""
