"""Where an autopilot stands, what may come next, and what it has decided.

What: `Phase` names each place, `ARROWS` is the whole table of ways from one to another, and `State` is the phase with
what belongs to it: whose plan is in force, and the tide that carries it out. A `PlanEvent` is noted for each plan that
is made or corrected.

    WAITING ---> OBSERVING ---> CHANGING ---> COMPARED ---> SETTLED
       ^             |          |  ^  ^  ^       |             |
       |             |          |  |  |  +-------+-------------+
       +-------------+----------+  |  +--- and back to the phase that its plan was in
                     |             +--- from WAITING, where the batch is of a shape that has a plan
                     +---> REFUSED                    (from all but CHANGING: REMOVED)

Cost: nothing. Not covered: when a plan is made again (machine.py), and what was measured (corrections.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lowtide.runtime.autopilot.plan_cache import ShapeBucket
from lowtide.runtime.session.tide import Tide


class Phase(Enum):
    """Where an autopilot stands. Between two forward passes it is in any phase but OBSERVING and CHANGING."""

    WAITING = "waiting"
    """No plan is in force; the next forward pass sees to one. Before the first step, and after one that failed."""
    OBSERVING = "observing"
    """A step is being observed and planned for, inside of a forward pass."""
    CHANGING = "changing"
    """The plan that was in force is off, and another one goes on in the same call."""
    COMPARED = "compared"
    """A plan is in force, and what its steps take is compared with what was predicted."""
    SETTLED = "settled"
    """A plan is in force, and its steps are not compared any more."""
    REFUSED = "refused"
    """No plan fits the first step: the model is as it was."""
    REMOVED = "removed"
    """The user is done: the model is as it was, for good."""


ARROWS: dict[tuple[Phase, Phase], str] = {
    (Phase.WAITING, Phase.OBSERVING): "a shape that has no plan comes",
    (Phase.WAITING, Phase.CHANGING): "a shape comes that has a plan",
    (Phase.WAITING, Phase.REMOVED): "the user is done before a step has run",
    (Phase.OBSERVING, Phase.CHANGING): "a plan was found",
    (Phase.OBSERVING, Phase.WAITING): "the model failed, or no plan fits a shape that is not the first",
    (Phase.OBSERVING, Phase.REFUSED): "no plan fits the first step",
    (Phase.OBSERVING, Phase.REMOVED): "the user is done while a step is observed",
    (Phase.CHANGING, Phase.CHANGING): "the plan that comes is known by now",
    (Phase.CHANGING, Phase.OBSERVING): "what comes has a shape that has no plan",
    (Phase.CHANGING, Phase.COMPARED): "the plan is on, and new",
    (Phase.CHANGING, Phase.SETTLED): "the plan is on, and was compared before, or predicts nothing",
    (Phase.CHANGING, Phase.WAITING): "the plan could not be put on",
    (Phase.COMPARED, Phase.SETTLED): "the last comparison is over",
    (Phase.COMPARED, Phase.CHANGING): "another shape comes, or the plan is made again",
    (Phase.COMPARED, Phase.REMOVED): "the user is done",
    (Phase.SETTLED, Phase.CHANGING): "another shape comes, or the plan is made again",
    (Phase.SETTLED, Phase.REMOVED): "the user is done",
    (Phase.REFUSED, Phase.REMOVED): "the user is done",
}
"""Every way from one phase to another, and what takes it there."""

IN_FORCE = frozenset({Phase.COMPARED, Phase.SETTLED})
_WITHOUT_PLAN = frozenset({Phase.WAITING, Phase.OBSERVING, Phase.REFUSED})


@dataclass(frozen=True, slots=True)
class State:
    """A phase, and whose plan that is about."""

    phase: Phase = Phase.WAITING
    key: ShapeBucket | None = None
    """The shapes whose plan is in force, or is off for a moment; None where there is none."""
    tide: Tide | None = None
    """What carries that plan out. Of an autopilot that was removed, the last one: its totals can still be read."""

    def __post_init__(self) -> None:
        if self.phase is not Phase.REMOVED:
            assert (self.tide is not None) == (self.phase in IN_FORCE), self.phase
            assert (self.key is None) == (self.phase in _WITHOUT_PLAN), self.phase

    def to(self, phase: Phase, key: ShapeBucket | None = None, tide: Tide | None = None) -> State:
        """The state after this one. The one place where phases change; asserts that the table has the arrow."""
        assert (self.phase, phase) in ARROWS, f"no way from {self.phase.value} to {phase.value}"
        return State(phase, key, tide)


FIRST_STEP = "first step"
NEW_SHAPE = "new shape"
CHANGED = "the model changed: "
"""How the event of a plan for another state of the model begins."""
ACCUMULATES = "gradients stay"
SEVERAL_PASSES = "several forward passes before a backward pass"
OPTIMIZER = "an optimizer was found"
VARIES = "shapes vary"
UNSTEADY = "recipes do not hold"
REFUSED = "layers cannot run again"
OUT_OF_MEMORY = "out of memory"
_NOT_CORRECTIONS = (
    FIRST_STEP, NEW_SHAPE, CHANGED, ACCUMULATES, SEVERAL_PASSES, OPTIMIZER, VARIES, UNSTEADY, REFUSED,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent:
    """One time that the autopilot made, corrected or changed its plan."""

    forward: int
    """How many planned forward passes had run."""
    why: str
    """'first step', 'new shape', 'the model changed: ...', 'several forward passes before a backward pass', 'an
    optimizer was found', 'shapes vary', 'gradients stay', 'recipes do not hold', 'layers cannot run again',
    'peak: ...', 'loop: ...', 'compute: ...', 'stalls: ...', 'out of memory'."""
    budget_bytes: int | None
    """What the solver was given: the budget, less what measurements showed beyond its prediction; None without one."""
    digest: str
    seconds: float
    """Time that observing and planning took."""

    @property
    def is_correction(self) -> bool:
        """Whether the plan was made again because a step was not as predicted."""
        return not self.why.startswith(_NOT_CORRECTIONS)
