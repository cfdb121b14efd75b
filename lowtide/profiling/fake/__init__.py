"""The same profile without running a step: tensors without bytes, times from a model of the hardware.

Start at `trace.py`; `fake_model.py` finds layers that are alike, `expand_layers.py` writes them out again.
May import: the rest of `profiling` and what that may import.
Must not: allocate what the model would allocate, or draw random numbers.
"""
