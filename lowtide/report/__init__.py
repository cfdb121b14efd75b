"""What a plan says and what a run did, as tables, pages and traces.

Start at `report.py`, what a report has; `played_step.py` puts a step on the clock, `write.py`, `page.py` and
`memory_snapshot.py` write it; `run_files.py` is what a run leaves for its report, `run_folder.py` reads it.
`budget_sweep.py` says what other budgets would cost, `plan_diff.py` compares plans, `doctor.py` looks at the machine.
May import: everything below it.
Must not: change what it reports on.
"""
