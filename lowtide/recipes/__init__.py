"""One storage made from others: the graph of recorded operators, a recipe built from it, a recipe proven and executed.

Start at `graph.py` (what was recorded), then `build.py` (the writer) and `execute.py` (the reader).
May import: `tensors`, `core`, `errors`, `units`.
Must not: hold on to storages between steps, or decide what is recomputed.
"""
