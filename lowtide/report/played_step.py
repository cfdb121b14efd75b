"""A solved plan, played on the clock once more: bytes on the device in each tick, and what each lane does when.

What: `play` runs the timeline of a plan on its profile. `Played` has the memory curve, the same bytes by owner and as
blocks that come and go, and the events of the lanes. Everything that draws or exports a step starts from it.
Cost: two runs of the timeline. Not covered: what really happened; the clock is a prediction.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.config.memory import MemoryConfig
from lowtide.core.fate import Fate
from lowtide.core.json_text import build, parse_json
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, layer_of
from lowtide.errors import ConfigError
from lowtide.planner.by_rules import NO_COSTS, HostCosts, charged, problem_of
from lowtide.planner.in_backward import in_turn_of
from lowtide.planner.place_state import placed_fates, shares_of
from lowtide.planner.problem import Problem
from lowtide.planner.smaller import fates_of
from lowtide.planner.state_items import StateShares, with_state
from lowtide.timeline.events import Event, Timeline, run
from lowtide.timeline.memory import Lifetimes, StepArrays, earliest_evict, plain_curve
from lowtide.timeline.step import Link, Step

OWNERS = ("state, gradients, temporaries", "kept", "swapped, while here", "recomputed, while here")
"""Whose bytes a curve by owner shows, from the bottom up."""
_STATE, _RECOMPUTED = 0, 3
_OWNER_OF = {Fate.KEEP: 1, Fate.SWAP: 2, Fate.RECOMPUTE: _RECOMPUTED}


def thinned_starts(num_ticks: int, max_points: int) -> np.ndarray:
    """Where at most so many parts of the ticks begin, all about equal."""
    count = min(max_points, num_ticks)
    return np.unique(np.arange(count) * num_ticks // count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Bytes of one thing that are on the device in ticks `start .. end-1`."""

    name: str
    owner: int
    """A place in `OWNERS`."""
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One step of a plan on the clock. What is there for each tick of the step is in their order."""

    seconds: tuple[float, ...]
    """How long each tick takes in the plain step."""
    num_forward_ticks: int
    plain_bytes: tuple[int, ...]
    """On the device in each tick of the plain step."""
    planned_bytes: tuple[int, ...]
    """The same of the plan."""
    budget_bytes: int | None
    starts: tuple[float, ...]
    """When each tick starts in the planned step, stalls and recomputation included. Seconds."""
    bytes_by_owner: tuple[tuple[int, ...], ...]
    """In the order of `OWNERS`, one entry a tick; together the planned bytes."""
    step_seconds: float
    events: tuple[Event, ...]
    """Events on the lanes 'compute', 'out', 'in' and 'stall', by start."""
    blocks: tuple[Block, ...] = ()
    """Activations, retained inputs and travelling optimizer state: twice where something leaves and comes back. What
    else is on the device has no blocks."""

    def thinned(self, max_points: int) -> dict[str, list[float] | list[int]]:
        """Curves as lists for JSON of at most `max_points` points; each has the most bytes of its ticks."""
        starts = thinned_starts(len(self.seconds), max_points)
        return {
            "start_seconds": (np.cumsum(self.seconds) - self.seconds)[starts].tolist(),
            "plain_bytes": np.maximum.reduceat(self.plain_bytes, starts).tolist(),
            "planned_bytes": np.maximum.reduceat(self.planned_bytes, starts).tolist(),
        }

    def to_json(self) -> str:
        """As text; `Played.from_json` gives back an equal one."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Played:
        """What `to_json` wrote. Raises ConfigError for anything else."""
        try:
            return build(cls, parse_json(text, "file"))
        except ConfigError as error:
            raise ConfigError(f"not as lowtide wrote it: {error}") from None


def play(
    plan: Plan,
    profile: Profile,
    config: MemoryConfig,
    *,
    link: Link,
    has_gradients: bool = False,
    costs: HostCosts = NO_COSTS,
) -> Played:
    """`plan`, which was solved for `profile` under the rules of `config`, with these costs of the runtime itself."""
    costs = costs.on(profile.device)
    profile = charged(profile, costs)
    how: Any = {"has_gradients": has_gradients, "layer_seconds": costs.layer_seconds}
    placed = plan.optimizer
    shares: StateShares | None = None
    if placed is not None and placed.overlap == "in_backward":
        shares = in_turn_of(plan.weights, placed, profile, config, link)
    problem = problem_of(profile, config, layers=plan.rules.rerun(plan.layers), shares=shares, **how)
    again = _second_runs(problem)
    is_plain = shares is None and not again.any()
    plain_problem = problem if is_plain else problem_of(profile, config, has_gradients=has_gradients, layers=())
    seconds, plain = _plain_ticks(problem, plain_problem, again)
    # A retained input that the plan does not name is not needed, so its fate does not matter.
    fate_of, num_ticks = fates_of(plan.sites), len(problem.step.ticks)
    fates = [fate_of.get(item.name, item.fates[0]) for item in problem.step.items]
    num_items = len(problem.nodes)
    if shares is None and placed is not None and placed.moved_bytes:
        shares = shares_of(profile.state, link, config.host_budget, may_stay=config.optimizer == "auto")
        assert shares is not None
        problem = with_state(problem, shares)
        fates += placed_fates(placed, profile.state, shares)
    limit_bytes = None if plan.predicted is None else plan.predicted.limit_bytes
    timeline = run(problem.step, fates, link, budget_bytes=limit_bytes or plan.budget_bytes, with_events=True)
    events = tuple(sorted(timeline.events, key=lambda event: event.start))
    presences = _presences(problem.step, fates, timeline, num_items)
    return Played(
        seconds=seconds,
        num_forward_ticks=problem.step.num_forward_ticks,
        plain_bytes=plain,
        planned_bytes=timeline.curve[:num_ticks],
        budget_bytes=plan.budget_bytes,
        starts=_starts(events, num_ticks, problem.step.num_forward_ticks),
        bytes_by_owner=_by_owner(problem.step, timeline, presences, num_ticks),
        step_seconds=timeline.step_seconds,
        events=_with_layer_names(events, problem, again, profile.layers),
        blocks=_shown(presences, num_ticks),
    )


def _second_runs(problem: Problem) -> np.ndarray:
    """For each operator whether it is of a layer that runs again: in the backward pass, and none of it."""
    num_forward = problem.profile.num_forward_ops
    names = problem.profile.op_names
    return np.array([op >= num_forward and not name.endswith(":backward") for op, name in enumerate(names)], bool)


def _plain_ticks(
    problem: Problem, plain_problem: Problem, again: np.ndarray
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Seconds and bytes of each tick of `problem` when everything is kept: what runs again takes no time then, and the
    bytes are those of the operator before it."""
    by_tick, first = plain_curve(plain_problem.step), list(problem.starts[:-1])
    by_op = np.repeat(by_tick[:-1], np.diff(plain_problem.starts))
    assert len(by_op) == np.count_nonzero(~again), "a step that runs layers again has the operators of the plain one"
    plain = np.maximum.reduceat(by_op[np.cumsum(~again) - 1], first)
    seconds = np.add.reduceat(np.where(again, 0.0, problem.profile.op_seconds), first)
    return (*seconds.tolist(), 0.0), (*plain.tolist(), int(by_tick[-1]))


def _with_layer_names(
    events: Sequence[Event], problem: Problem, again: np.ndarray, layers: Sequence[str]
) -> tuple[Event, ...]:
    """What compute does, with second runs by the name of their layer."""
    names = {}
    for tick, op in enumerate(problem.starts[:-1]):
        if again[op]:
            path = problem.profile.op_names[op]
            layer = layer_of(path, layers) or path
            names[f"backward {tick - problem.step.num_forward_ticks}"] = f"recompute {layer}"
    return tuple(dataclasses.replace(event, name=names.get(event.name, event.name)) for event in events)


def _starts(events: Sequence[Event], num_ticks: int, num_forward_ticks: int) -> tuple[float, ...]:
    """Each tick starts where the one before it has ended; what a tick recomputes comes before it."""
    ends = {event.name: event.end for event in events if event.lane == "compute"}
    starts, now = [], 0.0
    for tick in range(num_ticks):
        starts.append(now)
        name = f"forward {tick}" if tick < num_forward_ticks else f"backward {tick - num_forward_ticks}"
        now = max(now, ends.get(name, now))  # sums of floats may step back by their last digit
    return tuple(starts)


def _presences(step: Step, fates: Sequence[Fate], timeline: Timeline, num_items: int) -> list[Block]:
    """When each item is there, by the rules of timeline/memory.py. Items from `num_items` on are optimizer state."""
    arrays = StepArrays.of(step)
    lives, earliest = Lifetimes.of(arrays, fates), earliest_evict(arrays)
    found = []
    for index, (item, fate) in enumerate(zip(step.items, fates, strict=True)):
        need, release = int(lives.need[index]), int(lives.release[index])
        dies = int(lives.dies[index])
        spans = [(item.born, dies)]
        if lives.is_held[index]:
            spans = [(item.born, max(dies, release))]
        elif lives.is_made[index]:
            spans.append((need, release))
        elif lives.is_swapped[index]:
            gone, back = timeline.evict_by[index], timeline.prefetch_at[index]
            assert gone is not None and back is not None, "every swapped item leaves and is fetched at some tick"
            needed = max(need, item.dies)
            spans = [(item.born, max(int(earliest[index]), gone)), (min(max(back, item.dies), needed), release)]
        owner = _OWNER_OF[fate] if index < num_items else _STATE
        found += [
            Block(name=item.name, owner=owner, nbytes=item.nbytes, start=start, end=end)
            for start, end in spans
            if end > start and item.nbytes
        ]
    return found


def _by_owner(
    step: Step, timeline: Timeline, presences: Sequence[Block], num_ticks: int
) -> tuple[tuple[int, ...], ...]:
    """The state that travels counts as state; what recipes need while they run, as recomputed."""
    parts = np.zeros((len(OWNERS), len(step.ticks) + 1), np.int64)
    for block in presences:
        parts[block.owner, block.start] += block.nbytes
        parts[block.owner, block.end] -= block.nbytes
    parts = np.cumsum(parts, axis=1)[:, :-1]
    parts[_STATE] += np.array([tick.base_bytes for tick in step.ticks], np.int64)
    parts[_RECOMPUTED] += np.array(timeline.curve, np.int64) - parts.sum(axis=0)
    return tuple(tuple(part[:num_ticks].tolist()) for part in parts)


def _shown(presences: Sequence[Block], num_ticks: int) -> tuple[Block, ...]:
    """Within the ticks of the curve. In the first tick travelling state has no bytes of its own (state_items.py)."""
    shown = []
    for block in presences:
        start, end = max(block.start, int(block.owner == _STATE)), min(block.end, num_ticks)
        if end > start:
            shown.append(dataclasses.replace(block, start=start, end=end))
    return tuple(shown)
