"""MindSpore Transformers' `recompute_config` and `swap_config`, from the file to the running step.

Start at `schema/` (reads), then `plan.py` (which fate each activation gets) and `follow.py` (applies it).
May import: everything below it; it is a customer of the autopilot.
Must not: be imported from below. `cli`, `train` and the public surface use it.
"""
