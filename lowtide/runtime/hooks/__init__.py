"""One forward pass: each saved tensor is looked at once, then gets its fate by its position.

Start at `forward_pass.py`. What the first forward decides by name: `first_forward.py`; the tables that it leaves and
that later ones check against, and what a tensor is: `context.py`; layers that run again: `regions.py`.
May import: `runtime/recompute`, `runtime/offload`, `runtime/saved`, `profiling` and all below.
Must not: outlive its forward pass; what lasts is in `context.py`.
"""
