"""Weights and gradients that live elsewhere, and come for their layer's turn.

Start at `swap.py` (`swap_weights` and its handle: whose turn it is), then `moves.py`: the rules of order. `planned.py`
has it follow plans.
May import: what stands below, `optimizer` and `runtime` among it.
Must not: give a parameter or a gradient another object, or hold a layer's bytes beyond its turn.
"""
