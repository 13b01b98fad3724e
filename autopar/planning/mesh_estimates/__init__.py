"""Estimates of all arrangements of devices for one model: what `mesh="auto"` plans exactly first, and what never.

Knows programs, plans and schedules, and nothing of how a user asks or how a model is captured.
"""
