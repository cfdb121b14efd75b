"""What the ranks of a job agree on: one budget, one plan, one moment to observe a step or to correct a plan.

What: small collectives over Python objects; with one rank each returns its argument. An error on one rank is an error
on all, so that no rank waits for one that has failed. Before every collective but the first, `PlanConsensus` asks
whether all ranks have come to it. If batches have different lengths on different ranks, one rank may have a new shape
when the others do not, and a collective would wait for ever. So each rank writes the name of its decision to the store
of the process group. If one rank does not come in time, no rank waits any longer, now or later, and from then on each
decides for itself.

Why that is safe: a plan of the solver has no collective in any recipe, so two ranks may follow different plans. (A plan
of `select_comm_recompute` may have some. Its ranks have the same shapes, since the model's own collectives match.)
Cost: one `all_gather_object` a call; a meeting is a few messages to the store, and happens only when something is to be
decided. Not covered: a job that fails on one rank alone ends the others as it would without lowtide.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.tensors.private import default_store
from lowtide.tensors.ranks import gather

PATIENCE_SECONDS = 10.0
"""Ranks that train together begin a forward pass closer together than this."""
_POLL_SECONDS = 0.002
_GO, _STOP = b"go", b"stop"


class PlanConsensus:
    """The ranks that share a plan. Made by all of them at once."""

    def __init__(
        self, group: Any, budget_bytes: int | None = None, *, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        answers = gather((budget_bytes, uuid.uuid4().hex), group)
        self.group = group
        budgets = [budget for budget, _ in answers if budget is not None]
        self.budget_bytes = min(budgets, default=None)
        """What all can keep; None where no rank has a budget."""
        self.is_together = True
        """Whether every rank came to every meeting so far."""
        self._has_collectives = False
        """In the model's own forward pass: then no rank may observe a step alone."""
        self._name = f"lowtide/{answers[0][1]}"
        self.num_ranks = len(answers)
        self._patience_seconds = patience_seconds

    def meet_first(self, shapes: tuple[tuple[int, ...], ...], profile: Profile) -> None:
        """The first step was observed, which all ranks take together, whatever they feed the model: where these are
        inputs of several `shapes`, each rank decides for itself from now on."""
        answers = gather((shapes, profile.num_collectives), self.group)
        self._has_collectives = any(num for _, num in answers)
        if len({shapes for shapes, _ in answers}) > 1:
            self.part()

    def part(self) -> None:
        """From now on each rank decides for itself. To be called on all, or never."""
        self.is_together = self.num_ranks == 1

    def may_observe(self, what: str) -> bool:
        """Whether this rank may observe a step after the first one: where the model has collectives, which run once
        more then, all ranks have to be there, to observe the same. `what` names it."""
        return self.all_here(what) or not self._has_collectives

    def all_here(self, what: str) -> bool:
        """Whether every rank wants to decide `what` now. The same answer on all that ask; once False, always False."""
        if self.num_ranks == 1 or not self.is_together:
            return self.is_together
        is_late = after(self._patience_seconds)
        self.is_together = meet(default_store(), f"{self._name}/{what}", self.num_ranks, is_late)
        return self.is_together


def after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since this call."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def meet(
    store: dist.Store,
    place: str,
    num_ranks: int,
    gives_up: Callable[[], bool],
    *,
    poll_seconds: float = _POLL_SECONDS,
) -> bool:
    """Whether all ranks come to `place` before the first of them `gives_up`. The same answer on all."""
    if store.add(f"{place}/count", 1) == num_ranks:
        return store.compare_set(f"{place}/decision", "", _GO.decode()) == _GO
    while not store.check([f"{place}/decision"]):
        if gives_up():
            # The last one may come at this very moment; the first that writes decides for all.
            return store.compare_set(f"{place}/decision", "", _STOP.decode()) == _GO
        time.sleep(poll_seconds)
    return store.get(f"{place}/decision") == _GO


def agreed(plan: Plan | None, error: BudgetError | None, group: Any) -> Plan:
    """The first rank's plan, if every rank has one; else the error with the highest floor, on every rank."""
    own = None if error is None else (str(error), error.floor_bytes, error.suggestions)
    answers = gather((None if plan is None else plan.to_json(), own), group)
    errors = [packed for _, packed in answers if packed is not None]
    if errors:
        message, floor_bytes, suggestions = max(errors, key=lambda packed: packed[1])
        raise BudgetError(message, floor_bytes=floor_bytes, suggestions=suggestions)
    if len(answers) == 1:
        assert plan is not None
        return plan
    return Plan.from_json(answers[0][0])
