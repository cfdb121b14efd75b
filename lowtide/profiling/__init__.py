"""One step watched, and what it saved, when, for how long and at what cost, as a `Profile`.

Start at `observe_step.py` (a real step) or `fake/trace.py` (a fake one); `step_recorder.py` is what watches.
May import: `recipes`, `tensors`, `timeline`, `core`, `errors`, `units`.
Must not: leave anything behind in the model, or take part in a planned step.
"""
