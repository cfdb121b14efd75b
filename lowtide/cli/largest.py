"""`lowtide plan RUN.yaml --largest sequence`: the largest size for which a plan fits the budget, and what it costs.

What: the run is traced and planned at one size after the other, of a sequence or of a batch, as it stands in the run
file otherwise. The first is the run's own. A plan's floor (the least peak that can be reached) is nearly a line in the
size, so the next size is where the line through the last two meets the budget; where that does not help, twice as
much, or the middle.
Cost: a trace and a plan for each size, of which there are some six to ten. Sizes are searched until the largest that
fits and the smallest that does not are within 2 %. Not covered: sizes at which a larger one fits and a smaller does
not (a loss that is taken in slices from some size on); clusters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.config.run import RunConfig
from lowtide.core.fate import Fate, Tier
from lowtide.core.text_table import align
from lowtide.errors import BudgetError
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.core.plan import Plan

MEASURES = ("sequence", "batch")
_CLOSE = 0.02
_UNITS = {"sequence": 64, "batch": 1}
_MOST_TIMES = 4
"""The next size is at most so many times the last one: a line through two small sizes says little of large ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One size that was planned."""

    size: int
    tokens: int
    """Of a step."""
    floor_bytes: int
    plan: Plan | None
    """None: no plan fits."""
    why: str = ""
    """Why none does."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        predicted = None if self.plan is None else self.plan.predicted
        shown = {"size": self.size, "tokens": self.tokens, "floor_bytes": self.floor_bytes, "why": self.why or None}
        if self.plan is None or predicted is None:
            return shown | {"fits": False}
        times = {key: getattr(predicted, key) for key in ("peak_bytes", "step_seconds", "recompute_seconds")}
        return shown | {"fits": True, **times, "bytes_by_tier": dict(bytes_by_tier(self.plan))}


def with_size(run: RunConfig, measure: str, size: int) -> RunConfig:
    """The run with sequences, or batches, of this size."""
    if measure == "batch":
        return dataclasses.replace(run, train=dataclasses.replace(run.train, batch_size=size))
    return dataclasses.replace(run, data=dataclasses.replace(run.data, sequence_length=size))


def size_of(run: RunConfig, measure: str) -> int:
    return run.train.batch_size if measure == "batch" else run.data.sequence_length


def largest(run: RunConfig, measure: str, budget_bytes: int, plan_of: Callable[[RunConfig], Plan]) -> list[Trial]:
    """Every size that is planned, by `plan_of`, which raises `BudgetError` where none fits."""
    unit, trials = _UNITS[measure], dict[int, Trial]()
    size: int | None = size_of(run, measure)
    while size is not None:
        sized = with_size(run, measure, size)
        trials[size] = _try(sized, size, plan_of)
        size = next_size({each.size: each.floor_bytes for each in trials.values()}, budget_bytes, unit)
    return list(trials.values())


def _try(run: RunConfig, size: int, plan_of: Callable[[RunConfig], Plan]) -> Trial:
    tokens = run.train.batch_size * run.data.sequence_length
    try:
        plan = plan_of(run)
    except BudgetError as error:
        return Trial(size=size, tokens=tokens, floor_bytes=error.floor_bytes, plan=None, why=str(error))
    assert plan.predicted is not None
    return Trial(size=size, tokens=tokens, floor_bytes=plan.predicted.floor_bytes, plan=plan)


def next_size(floors: Mapping[int, int], budget_bytes: int, unit: int) -> int | None:
    """The next size to try, after those whose floors are known; None: the answer is known closely enough."""
    fits = max((size for size, floor in floors.items() if floor <= budget_bytes), default=0)
    fails = min((size for size, floor in floors.items() if floor > budget_bytes), default=None)
    if fails is not None and (fails - fits <= unit or fails - fits <= _CLOSE * fits):
        return None
    guess = 2 * fits if fails is None else (fits + fails) // 2
    known = sorted(floors.items(), key=lambda each: abs(each[1] - budget_bytes))[:2]
    if len(known) == 2 and known[0][1] != known[1][1]:
        (size, floor), (other, other_floor) = known
        slope = (floor - other_floor) / (size - other)
        if slope > 0:
            guess = int(size + (budget_bytes - floor) / slope)
    near = max(unit, int(_CLOSE * fits / 2))
    if not fits:
        assert fails is not None
        guess = min(max(guess, fails // _MOST_TIMES), fails - 1)
    elif fails is None:
        guess = min(max(guess, fits + near), _MOST_TIMES * fits)
    elif guess <= fits + near:  # the line says that the answer is next to a size that is known: prove it, once
        guess = (fits + fails) // 2 if any(fits - 2 * near <= size < fits for size in floors) else fits + near
    elif guess >= fails - near:
        guess = (fits + fails) // 2 if any(fails < size <= fails + 2 * near for size in floors) else fails - near
    guess = max(guess // unit * unit, min(unit, guess))
    return None if guess in floors or guess < 1 else guess


def bytes_by_tier(plan: Plan) -> Mapping[str, int]:
    """What a plan has outside of the device at once: activations that are swapped, and the optimizer's state."""
    found = {Tier.HOST.value: 0, Tier.DISK.value: 0}
    for site in plan.sites:
        if site.fate is Fate.SWAP:
            found[(site.tier or Tier.HOST).value] += site.stored_bytes
    if plan.optimizer is not None:
        found[plan.optimizer.tier.value] += plan.optimizer.moved_bytes or 0
    return found


def lines_of(trials: list[Trial], measure: str, budget_bytes: int, width: int | None) -> list[str]:
    """For people: a row for each size, by size."""
    cells = [(measure, "step", "tokens/s", "peak", "host", "disk", "floor")]
    for trial in sorted(trials, key=lambda each: each.size):
        floor = format_bytes(trial.floor_bytes)
        if trial.plan is None or trial.plan.predicted is None:
            cells.append((f"{trial.size:,}", "no plan", "", "", "", "", floor))
            continue
        predicted, places = trial.plan.predicted, bytes_by_tier(trial.plan)
        seconds = predicted.step_seconds + predicted.check_seconds
        cells.append(
            (
                f"{trial.size:,}",
                format_seconds(seconds),
                f"{trial.tokens / seconds:,.0f}",
                format_bytes(predicted.peak_bytes),
                format_bytes(places[Tier.HOST.value]),
                format_bytes(places[Tier.DISK.value]),
                floor,
            )
        )
    fitting = max((each.size for each in trials if each.plan is not None), default=None)
    failing = min((each for each in trials if each.plan is None), key=lambda each: each.size, default=None)
    lines = align(cells, numeric=tuple(range(len(cells[0]))), width=width)
    if fitting is None:
        lines.append(f"no {measure} fits {format_bytes(budget_bytes)}")
    else:
        lines.append(f"largest {measure} in {format_bytes(budget_bytes)}: {fitting:,}")
    if failing is not None:
        lines.append(f"beyond, at {failing.size:,}: {failing.why.splitlines()[0]}")
    return lines
