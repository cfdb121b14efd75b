"""The memory that bytes go to: host buffers, the arena of pinned memory, the disk; and how much of it there is.

Start at `arena.py` (pinned host memory) and `disk.py` (files); `host_limit.py` says how much the host has.
May import: `errors`, `units`.
Must not: know of engines, lanes or devices.
"""
