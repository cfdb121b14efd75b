"""What a plan says and what a run did, as tables, pages and traces.

Start at `report.py`, what a report has; `played_step.py` puts a step on the clock, `page.py` and `trace.py` write it.
`budget_sweep.py` says what other budgets would cost, `plan_diff.py` compares plans, `doctor.py` looks at the machine.
May import: everything below it.
Must not: change what it reports on.
"""
