"""Moves saved storages over an engine: offload, prefetch, spill.

Start at `scheduler.py`; `site.py` is what it moves, `spill.py` what happens near a limit.
May import: `runtime/saved`, `engines`, `tensors`, `core`, `errors`, `units`.
Must not: decide a fate. It owns every rule of order, under one lock.
"""
