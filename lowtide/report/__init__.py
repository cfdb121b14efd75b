"""What a plan says and what a run did, as tables and curves.

Start at `budget_sweep.py` (what other budgets would cost) and `memory_curve.py` (bytes over one step).
May import: everything below it.
Must not: change what it reports on.
"""
