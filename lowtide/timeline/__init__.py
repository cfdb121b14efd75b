"""One training step on a clock: ticks, items, lanes, the memory curve; and the numbers of hardware.

Start at `step.py`, the data; `events.py` runs a step and says when what is where.
May import: `core`, `config` (to read a file of hardware), `errors`, `units`.
Must not: import torch. It is plain arithmetic: the same numbers in give the same numbers out.
"""
