"""One plan on one model: apply, stats, audit, retry after out-of-memory, remove.

Start at `apply.py`, then `tide.py`.
May import: `runtime/hooks` and all below.
Must not: make plans, except tighter ones after an out-of-memory (`tighten.py`).
"""
