"""Drops activations and computes them again: whole regions, outputs of modules, single storages by recipe.

Start at `region.py` (layers) or `recipe_graph.py` (single storages).
May import: `runtime/offload`, `runtime/saved`, `recipes`, `tensors`, `core`, `errors`, `units`.
Must not: give back a tensor whose inputs are not the ones it was computed from.
"""
