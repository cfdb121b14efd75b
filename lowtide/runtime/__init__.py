"""One model trained by one plan. Six rooms, each of which may import those before it:
`saved`, `offload`, `recompute`, `hooks`, `session`, `autopilot`.

Start at `session/apply.py` (a plan that is there) or `autopilot/autopilot.py` (a budget).
May import: `profiling`, `recipes`, `engines`, `planner` and all below these.
Must not: know the formats of files that others write.
"""
