"""Observe, plan, apply, compare, correct: a model that stays within a budget. Plans by shape; ranks that agree.

Start at `optimize.py`, then `autopilot.py`.
May import: `runtime/session` and all below.
Must not: carry out a plan itself; a tide does.
"""
