"""What autograd holds instead of a tensor: handles, and the ledger of their bytes.

Start at `handle.py`.
May import: `tensors`, `core`, `errors`, `units`.
Must not: move or recompute anything. Every handle checks the version of its tensor when it is opened.
"""
