"""What an autopilot decided, and when: one `PlanEvent` for each plan that was made or corrected.

Cost: nothing. Not covered: what was measured (corrections.py).
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_STEP = "first step"
NEW_SHAPE = "new shape"
ACCUMULATES = "gradients stay"
VARIES = "shapes vary"
UNSTEADY = "recipes do not hold"
REFUSED = "layers cannot run again"
OUT_OF_MEMORY = "out of memory"
_NOT_CORRECTIONS = (FIRST_STEP, NEW_SHAPE, ACCUMULATES, VARIES, UNSTEADY, REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent:
    """One time that the autopilot made, corrected or changed its plan."""

    forward: int
    """How many planned forward passes had run."""
    why: str
    """'first step', 'new shape', 'shapes vary', 'gradients stay', 'recipes do not hold', 'layers cannot run again',
    'peak: ...', 'loop: ...', 'compute: ...', 'stalls: ...', 'out of memory'."""
    budget_bytes: int | None
    """What the solver was given: the budget, less what measurements showed beyond its prediction; None without one."""
    digest: str
    seconds: float
    """Time that observing and planning took."""

    @property
    def is_correction(self) -> bool:
        """Whether the plan was made again because a step was not as predicted."""
        return self.why not in _NOT_CORRECTIONS
