"""What other budgets would cost.

What: `budget_sweep` has the best plans for a few budgets, from the floor to the peak with everything kept, with the
optimizer's state placed for each anew as far as the configuration lets it move. `by_hand` is the same step with layers
checkpointed by hand.
Why: a budget is often a guess.
Cost: one short solve for each budget, two or three with `optimizer: auto`. Not covered: other batch sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import Prediction
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.text_table import align, percent
from lowtide.errors import BudgetError
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.rerun_layers import can_rerun
from lowtide.report.export import Setting, play_setting
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

_WAY_UP = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""The budgets that are tried: shares of the way from the floor to the peak with everything kept."""

BY_HAND = {"plain": 0, "every layer checkpointed": 1, "every second layer": 2}
"""Name -> every which layer runs again; 0: none."""


def by_hand(profile: Profile, every: int, *, link: Link, has_gradients: bool = False) -> Setting:
    """The step with every `every`-th layer checkpointed, with none for 0. All else of it is kept."""
    layers = can_rerun(profile)[::every] if every else ()
    return play_setting(Setting(lines=(), layers=layers), profile, link=link, has_gradients=has_gradients)


def checkpointed(profile: Profile, *, link: Link, has_gradients: bool = False) -> dict[str, Setting]:
    """By the names of `BY_HAND`, but for plain; none where no layer can run again."""
    rows = {name: by_hand(profile, every, link=link, has_gradients=has_gradients) for name, every in BY_HAND.items()}
    return {name: setting for name, setting in rows.items() if setting.layers}


Sweep = Mapping[int, Prediction]
"""Budgets in bytes, from the most memory to the least, and the predictions of the best plans for them."""


def budget_sweep(
    plan: Plan,
    profile: Profile,
    config: MemoryConfig,
    *,
    link: Link,
    has_gradients: bool = False,
    num_micro_batches: int = 1,
    time_limit_seconds: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Sweep:
    """`plan`'s own budget is among them."""
    asked, budget_bytes = plan.predicted, plan.budget_bytes
    assert asked is not None and budget_bytes is not None
    found = {budget_bytes: asked}
    assert asked.floor_bytes is not None, "a plan for one device"
    range_bytes = asked.plain_peak_bytes - asked.floor_bytes
    budgets = dict.fromkeys(asked.floor_bytes + int(range_bytes * share) for share in _WAY_UP)
    for number, budget in enumerate(budgets, start=1):
        if progress is not None:
            progress(f"other budgets, {number} of {len(budgets)}")
        try:
            other = plan_profile(
                profile,
                config,
                link=link,
                budget_bytes=budget,
                has_gradients=has_gradients,
                num_micro_batches=num_micro_batches,
                time_limit_seconds=time_limit_seconds,
            ).predicted
        except BudgetError:
            continue  # the solver needs more time to reach the floor than it has here
        assert other is not None
        found.setdefault(budget, other)
    return dict(sorted(found.items(), reverse=True))


def sweep_document(sweep: Sweep, own_bytes: int | None) -> list[dict[str, Any]]:
    """As plain data. `own_bytes`: the plan's budget."""
    return [
        {"budget_bytes": budget, "is_requested": budget == own_bytes, **dataclasses.asdict(predicted)}
        for budget, predicted in sweep.items()
    ]


def document_of(others: Mapping[str, Setting]) -> dict[str, Any]:
    """What `checkpointed` gives, as plain data."""
    return {name: {"peak_bytes": its.peak_bytes, "step_seconds": its.step_seconds} for name, its in others.items()}


def sweep_lines(
    sweep: Sweep, own_bytes: int | None, width: int | None = None, *, others: Mapping[str, Setting] | None = None
) -> list[str]:
    """Lines of text: a head, one line for each budget, and one for each way without a plan in `others`. 'codecs' is
    what storing smaller costs, 'optimizer' what its state costs on its way, each where there is any. `own_bytes`: the
    plan's budget."""
    cells: list[tuple[str, ...]] = [
        ("budget", "of plain", "peak", "step", "over plain", "stalls", "recompute", "codecs", "optimizer", "gap", "")
    ]
    for budget, found in sweep.items():
        cells.append(
            (
                format_bytes(budget),
                percent(budget / found.plain_peak_bytes),
                format_bytes(found.peak_bytes),
                format_seconds(found.step_seconds),
                percent(found.step_seconds / found.plain_seconds - 1 if found.plain_seconds else 0.0),
                format_seconds(found.stall_seconds),
                format_seconds(found.recompute_seconds),
                format_seconds(found.codec_seconds),
                format_seconds(found.optimizer_seconds),
                percent(found.gap),
                "<- this plan" if budget == own_bytes else "",
            )
        )
    plain = next(iter(sweep.values()))
    for name, setting in (others or {}).items():
        share = percent(setting.peak_bytes / plain.plain_peak_bytes)
        over = percent(setting.step_seconds / plain.plain_seconds - 1 if plain.plain_seconds else 0.0)
        peak, step = format_bytes(setting.peak_bytes), format_seconds(setting.step_seconds)
        cells.append(("-", share, peak, step, over, *("-",) * 5, f"{name}, without lowtide"))
    absent = set()
    if not any(found.codec_seconds for found in sweep.values()):
        absent.add("codecs")
    if not any(found.optimizer_seconds for found in sweep.values()):
        absent.add("optimizer")
    columns = [place for place, name in enumerate(cells[0]) if name not in absent]
    cells = [tuple(row[place] for place in columns) for row in cells]
    return align(cells, numeric=tuple(range(len(columns) - 1)), width=width)
