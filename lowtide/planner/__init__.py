"""A profile, a link and a budget give a plan.

Start at `plan_profile.py`, the door; then `by_rules.py`, `space.py`, `problem.py`, `relaxation.py`,
`local_search.py`, `solve.py`.
May import: `core`, `config`, `timeline`, `errors`, `units`; numpy and scipy.
Must not: import torch, run a model, or know who follows the plan.
"""
