"""Plans on one model: apply, stats, audit, retry after out-of-memory, remove.

One plan is a `Tide` (`tide.py`), which `apply.py` makes after all that can be checked was checked; `wrap.py` enters its
forward passes. Plans that come from observed steps, one for each shape of inputs, have one handle, `Tides`
(`tides.py`), and a source behind it: a budget (runtime/autopilot) or a file (mindformers/follow.py).

Start at `apply.py`, then `tide.py`, then `tides.py`.
May import: `runtime/hooks` and all below.
Must not: make plans, except tighter ones after an out-of-memory (`tide.py`).
"""
