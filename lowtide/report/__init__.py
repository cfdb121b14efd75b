"""What a plan says and what a run did, as tables, pages and traces.

Start at `report.py`, what a report has; `played_step.py` puts a step on the clock, `write.py` writes
it as a page, a trace or a memory snapshot; `run_folder.py` has what a run leaves for its report, and reads it.
`budget_sweep.py` says what other budgets would cost, `doctor.py` looks at the machine.
May import: everything below it.
Must not: change what it reports on.
"""
