"""A model that stays within a budget: observe, plan, apply, compare, correct.

Five files, of which each can be read from top to bottom:

- `autopilot.py`: the state machine. A forward pass comes, its plan is found or made, put on, compared, made again. At
  its end the way in, which makes a handle (session/tides.py) whose plans come from an autopilot.
- `facts.py`: what steps show that concerns the plans for all shapes (gradients, open passes, optimizers, failures).
- `planner.py`: makes a plan for the budget of all ranks, from a profile and these facts.
- `measure.py`: what a step took beside its prediction, and the rule of which number was wrong.
- `model_state.py`: whether the model is still the one that was planned for.

`plan_model.py` is `lowtide.plan`, which traces instead of training. What plans of a budget share with plans of a file
is below, in `runtime/session`: the handle, the observed step, the table of plans by shape, what ranks agree on.
docs/decisions/0101-a-fixed-plan-without-an-autopilot.md says why.

Start at `autopilot.py`.
May import: `runtime/session` and all below.
Must not: carry out a plan itself; a tide does. Be imported for a plan that is fixed.
"""
