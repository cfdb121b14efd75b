"""Plans that an autopilot makes: from what is known by now, for the budget of all ranks, agreed among them.

What: `Planning` joins a `PlanSource` (one rank's plans) with the ranks' consensus and with the facts that steps have
shown so far: the link, gradients that stay, recipes that did not hold. It also makes the plans that a race tries.
Cost: the solver, about a second a plan; ranks that agree exchange the plan's text once.
Not covered: when a plan is made (learn.py, review.py, again.py), and putting it on the model (in_force.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.runtime.autopilot.consensus import PlanConsensus, agreed, agreed_rivals
from lowtide.runtime.autopilot.contest import BEFORE, LEARNED, SOLVERS
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.autopilot.plan_source import Facts, PlanSource
from lowtide.timeline.step import Link


class Planning:
    """Where the plans of an autopilot are made. Made on all ranks of `group` at once."""

    def __init__(self, source: PlanSource, group: Any) -> None:
        self.source = source
        self.group = group
        self.consensus = PlanConsensus(group, source.budget_bytes)
        self.facts = Facts()
        """Replaced whenever a step shows something new; plans that are made from then on know it."""

    def know(self, **facts: Any) -> None:
        """More is known, or other, of these fields of `Facts`."""
        self.facts = dataclasses.replace(self.facts, **facts)

    @property
    def has_budget(self) -> bool:
        """Whether some rank has one."""
        return self.consensus.budget_bytes is not None

    @property
    def budget_bytes(self) -> int:
        """That of all ranks. Only where there is one."""
        assert self.consensus.budget_bytes is not None
        return self.consensus.budget_bytes

    def budget_for(self, shape: CachedPlan) -> int | None:
        """The budget, less what measurements of these shapes showed beyond the prediction."""
        return self.budget_bytes - shape.unforeseen_bytes if self.has_budget else None

    def make(self, profile: Profile, budget_bytes: int | None) -> Plan:
        """This rank's own. Raises BudgetError where none fits."""
        return self.source.make_plan(profile, self.facts, budget_bytes)

    def agreed(self, profile: Profile, budget_bytes: int | None, *, is_joint: bool) -> Plan:
        """The plan of all ranks if `is_joint`: all of them are making this call. BudgetErrors are shared as well."""
        if not is_joint:
            return self.source.localized(self.make(profile, budget_bytes), profile)
        error: BudgetError | None = None
        plan: Plan | None = None
        try:
            plan = self.make(profile, budget_bytes)
        except BudgetError as found:
            error = found.with_traceback(None)  # its frames would be a cycle, and hold this forward's output
        common = agreed(plan, error, self.group)
        # With other shapes the first rank's plan is not one for this rank.
        return self.source.localized(common if plan is None or self.consensus.is_together else plan, profile)

    def again(self, shape: CachedPlan, *, is_joint: bool, profile: Profile | None = None) -> Plan:
        """Another plan for the same shapes, with what is known by now. Raises BudgetError where none fits."""
        return self.agreed(profile or shape.profile, self.budget_for(shape), is_joint=is_joint)

    def first(self, profile: Profile, known: Iterable[CachedPlan], *, is_joint: bool) -> CachedPlan:
        """A plan for what was just observed; one that serves smaller shapes too, if some of the `known` do already.

        Raises BudgetError where none fits.
        """
        known = list(known)
        if any(shape.serves_smaller for shape in known):
            free = profile.without_sizes(is_proven=all(shape.plan.check != "sampled" for shape in known))
            with contextlib.suppress(BudgetError):
                plan = self.agreed(free, self.consensus.budget_bytes, is_joint=is_joint)
                return CachedPlan(profile=free, plan=plan, serves_smaller=True)
        return CachedPlan(profile=profile, plan=self.agreed(profile, self.consensus.budget_bytes, is_joint=is_joint))

    # -- for a race ------------------------------------------------------------------------------------------------

    def rivals(self, shape: CachedPlan) -> dict[str, Plan]:
        """Other plans that fit, by name, which every rank has found. All ranks call this at once.

        None of them moves the optimizer's state, or brings it back.
        """
        budget_bytes = self.budget_bytes - shape.unforeseen_bytes
        found: dict[str, Plan] = {}
        if shape.name != SOLVERS:
            with contextlib.suppress(BudgetError):
                found[SOLVERS] = self.make(shape.profile, budget_bytes)
        solvers = found.get(SOLVERS, shape.plan)
        found |= self.source.rivals(solvers, shape.profile, self.facts, budget_bytes)
        if shape.before is not None and _peak_bytes(shape.before) <= budget_bytes:
            found[BEFORE] = shape.before
        has_moved = self.facts.resident_state_bytes is not None
        return agreed_rivals({n: plan for n, plan in found.items() if _moves_state(plan) == has_moved}, self.group)

    def learned(self, shape: CachedPlan, link: Link | None) -> Plan | None:
        """The best plan at the prices of `link`, in this rank's names; None unless every rank has one.

        All ranks call this at once: they may have measured other links.
        """
        found: dict[str, Plan] = {}
        if link is not None:
            with contextlib.suppress(BudgetError):
                facts = dataclasses.replace(self.facts, link=link)
                plan = self.source.make_plan(shape.profile, facts, self.budget_bytes - shape.unforeseen_bytes)
                if _moves_state(plan) == _moves_state(shape.plan):
                    found[LEARNED] = plan
        common = agreed_rivals(found, self.group).get(LEARNED)
        return common if common is None else self.source.localized(common, shape.profile)


def _peak_bytes(plan: Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.peak_bytes


def _moves_state(plan: Plan) -> bool:
    return plan.optimizer is not None and plan.optimizer.moves
