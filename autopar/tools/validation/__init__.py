"""Validation of rules: a call runs whole, and in parts on ranks that are simulated in one process.

Knows rules and calls, and nothing of plans, costs or real ranks.
"""
