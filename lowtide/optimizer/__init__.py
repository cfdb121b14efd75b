"""Optimizer state that lives elsewhere between steps.

Start at `swap.py` (`swap_optimizer` and its handle), then `step.py`: one step, part by part. `buckets.py` says where
the bytes are between steps, `transfers.py` owns the order of copies, `groups.py` the user's `param_groups`.
May import: `engines`, `tensors`, `core`, `config`, `errors`, `units`.
Must not: know a class of optimizers by more than its name, or keep anything of an optimizer after `detach()`.
"""
