"""MindSpore Transformers' `recompute_config` and `swap_config`, from the file to the running step.

Start at `schema/` (reads), then `plan.py` (which fate each activation gets) and `follow.py` (applies it).
May import: everything below it but `runtime/autopilot`: a file is a fixed plan.
Must not: be imported from below. `cli`, the reference trainer and the public surface use it.
"""
