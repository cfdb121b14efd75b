"""A plan for a cluster without one: layouts, what each rank then keeps, swaps and recomputes, and the step's time.

Start at `search.py`, the way through; `shape.py` and `layer.py` are the model, `rank.py` plans one rank, `step.py`
plays the pipeline. `report.py` and `export.py` write down what was found. `sharded.py` is one rank of fully sharded
data parallelism, whose step is traced.
May import: files of schedules, `planner`, `timeline`, `config`, `units`, `errors`.
Must not: import torch or transformers, or look at a device. The model is a table of numbers.
"""
