"""Plans that are made again, for what steps have shown beside their peaks and times.

What: `Again` has one method for each reason: forward passes find gradients (micro-batches accumulate); recipes did not
hold, or layers could not be run again; the device ran out of memory though the budget was kept on paper.

Why it is safe: gradients that stay, and recipes and layers that did not hold, are known to the plans of all shapes from
then on (`Facts`). Where no plan fits with that, a `BudgetError` is raised and it is forgotten again, so that the next
forward pass is refused as well.
Cost: the solver, for each plan that is made. Not covered: a step that was not as predicted (review.py), and plans that
are to serve smaller shapes (learn.py).
"""

from __future__ import annotations

import time

from lowtide.errors import BudgetError
from lowtide.planner.smaller import form_of
from lowtide.runtime.autopilot.events import ACCUMULATES, OUT_OF_MEMORY, REFUSED, UNSTEADY
from lowtide.runtime.autopilot.in_force import PlanInForce
from lowtide.runtime.autopilot.phases import Phase
from lowtide.runtime.autopilot.planning import Planning

_TIGHTER = 0.9


class Again:
    """For one model on autopilot."""

    def __init__(self, in_force: PlanInForce, planning: Planning) -> None:
        self._in_force = in_force
        self._planning = planning

    def with_gradients(self) -> None:
        """Forward passes find gradients from now on (micro-batches accumulate): every plan is made again for that."""
        start = time.perf_counter()
        in_force = self._in_force
        before = self._planning.facts
        self._planning.know(has_gradients=True)
        shapes = list(in_force.shapes)
        if in_force.state.key is not None:
            in_force.count_review(in_force.shapes[in_force.state.key])  # its plan changes without one
        try:
            is_joint = bool(shapes) and in_force.decide(ACCUMULATES)
            plans = [self._planning.again(shape, is_joint=is_joint) for shape in shapes]
        except BudgetError:
            self._planning.facts = before  # so that the next one is refused as well
            raise
        for shape, plan in zip(shapes, plans, strict=True):
            in_force.replace(shape, plan)
        if in_force.state.key is not None:
            in_force.use(in_force.state.key, why=ACCUMULATES, seconds=time.perf_counter() - start)

    def without_unsteady(self) -> None:
        """Recipes that did not hold in the last step are no recipes, and layers that could not be run again will not
        be: plan again without them, so that memory fits."""
        tide = self._in_force.state.tide
        if tide is None:
            return
        failed, refused = tide.failed_recipes, tide.refused_layers
        before = self._planning.facts
        # A site may still be stored smaller where its recipe failed, and be made by its recipe where its codec did.
        smaller = {site.name for site in tide.plan.sites if site.codec is not None} if failed else ()
        lost = {name: form_of(name) if name in smaller else name for name in failed}
        failed = {name: why for name, why in failed.items() if lost[name] not in before.unsteady}
        refused = {name: why for name, why in refused.items() if name not in before.refused}
        key = self._in_force.state.key
        if key is None or not (failed or refused):
            return
        start = time.perf_counter()
        unsteady, layers = before.unsteady | {lost[name] for name in failed}, before.refused | refused.keys()
        self._planning.know(unsteady=unsteady, refused=layers)
        if failed:
            name, why = next(iter(failed.items()))
            self._in_force.say(f"lowtide: {len(failed)} recipes do not hold in every step: '{name}' {why}")
        if refused:
            why = next(iter(refused.values()))
            self._in_force.say(f"lowtide: {len(refused)} layers cannot be run again: {why}")
        shape = self._in_force.shapes[key]
        is_joint = self._in_force.decide(f"{UNSTEADY} {len(unsteady)} {len(layers)}")
        try:
            plan = self._planning.again(shape, is_joint=is_joint)
        except BudgetError:
            self._planning.facts = before  # so that the next forward is refused as well
            raise
        self._in_force.replace(shape, plan)
        self._in_force.use(key, why=UNSTEADY if failed else REFUSED, seconds=time.perf_counter() - start)

    def for_less(self) -> None:
        """Out of memory, though the budget was kept on paper: a tenth less. Nothing without a budget, or a plan.

        Raises BudgetError where no plan is that small; the budget and the plan then stay as they are.
        """
        in_force = self._in_force
        key = in_force.state.key
        if key is None or in_force.state.phase is Phase.REMOVED or not self._planning.has_budget:
            return
        shape = in_force.shapes[key]
        start = time.perf_counter()
        budget_bytes = self._planning.budget_bytes - shape.unforeseen_bytes
        # A preset plans for less than the budget.
        target = int(min(shape.plan.budget_bytes or budget_bytes, budget_bytes) * _TIGHTER)
        plan = self._planning.make(shape.profile, target)  # no other rank need be out of memory
        # Only now: where no plan is that small, the budget stays as it was.
        shape.unforeseen_bytes = self._planning.budget_bytes - target
        in_force.replace(shape, plan)
        in_force.use(key, why=OUT_OF_MEMORY, seconds=time.perf_counter() - start)
