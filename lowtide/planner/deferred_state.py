"""An optimizer's state whose updates wait for the next forward pass: its bytes in each tick, and what it costs.

What: `with_deferred` is the problem of a step under `overlap: deferred` (optimizer/deferred.py). The state is elsewhere
between steps. In forward its buckets come, step just before the first module that needs them, and leave, through a few
slots. Until then their gradients are held: they are made in backward and counted in forward too. `play_deferred` lays
the buckets' copies on the lanes of a step that was solved so, and says how long compute waits.

When a parameter is needed: backward says where gradients are made, by module; forward, where that module begins. Before
a layer that runs again as a whole, all of its parameters are brought up to date. State is taken to be spread over
parameters as gradients are, in the order of forward. A gradient whose module has no operator in forward is held to the
end of it, and its state is needed at once.

Rules of the lanes: a bucket is fetched when a place is free, from the start of forward on; copies of activations go
first on the lane out; what compute waits for moves all that comes after it; at the end of forward it waits for the last
bucket to leave. In a step of several micro-batches the first forward has all of it. With gradients that stay
(accumulation) those that are held are counted already.

Cost: some microseconds a bucket. Not covered: buckets that are fetched before the step is over, into memory that
backward has freed; copies of activations that move with what waits.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.profile import Profile
from lowtide.planner.problem import Problem
from lowtide.timeline.events import Timeline, run
from lowtide.timeline.step import Link

_NEVER = -1
"""The operator of a gradient whose module has none in forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredState:
    """Which part of the state that can move does, and how it travels. Bytes."""

    nbytes: int
    """Elsewhere between steps."""
    resident_bytes: int
    """Stays on the device: of the first parameters."""
    bucket_bytes: int
    num_slots: int
    temporaries: int
    """What the optimizer needs beside one bucket."""
    has_link_alone: bool = False
    """No activation is swapped that no rule names: buckets must leave in forward, when activations would."""

    @property
    def slot_bytes(self) -> int:
        return min(self.num_slots * self.bucket_bytes, self.nbytes)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes; the last one may be smaller."""
        whole, rest = divmod(self.nbytes, self.bucket_bytes)
        return (self.bucket_bytes,) * whole + (rest,) * (rest > 0)


def with_deferred(
    problem: Problem, deferred: DeferredState, *, has_gradients: bool, layers: Sequence[str] = ()
) -> Problem:
    """The problem in which this state comes and goes in forward. `has_gradients`: all of them are there from the start
    in any case. `layers` run again as a whole."""
    step, state = problem.step, problem.profile.state
    num_forward = step.num_forward_ticks
    held, uses = [0] * len(step.ticks), _uses(problem.profile, layers)
    if not has_gradients:
        ops = [op for op, _ in uses]
        after = list(itertools.accumulate((nbytes for _, nbytes in reversed(uses)), initial=0))[::-1]
        unplaced = sum(nbytes for op, nbytes in uses if op == _NEVER)
        for tick in range(num_forward):
            held[tick] = after[bisect.bisect_left(ops, problem.starts[tick])] + unplaced
    passing = [deferred.slot_bytes] * num_forward + [0] * (len(step.ticks) - num_forward)
    passing[-1] = deferred.slot_bytes  # for what cannot wait
    ticks = [
        dataclasses.replace(
            tick,
            base_bytes=tick.base_bytes - deferred.nbytes + waits + slots + (deferred.temporaries if slots else 0),
        )
        for tick, waits, slots in zip(step.ticks, held, passing, strict=True)
    ]
    ticks[-1] = dataclasses.replace(ticks[-1], base_bytes=ticks[-1].base_bytes - state.optimizer_temporaries)
    return dataclasses.replace(
        problem,
        step=dataclasses.replace(step, ticks=tuple(ticks)),
        held=tuple(there - deferred.nbytes for there in problem.held),
        state_bytes=deferred.nbytes,
        held_gradients=tuple(held),
        uses=tuple(uses),
        passing=tuple(passing),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredCost:
    """What of it compute feels, once a step of the optimizer. Seconds."""

    exposed_seconds: float
    """Compute waits: for buckets that have not come, and at the end of forward for the last to leave."""
    slowed_seconds: float
    """Compute beside which buckets are copied takes that much longer."""


def play_deferred(
    problem: Problem, timeline: Timeline, fates: Sequence, link: Link, deferred: DeferredState
) -> DeferredCost:
    """The cost beside `timeline`, the played step of `problem` (made by `with_deferred`) with these fates."""
    events = run(
        problem.step,
        fates,
        link,
        evict_by=timeline.evict_by,
        prefetch_at=timeline.prefetch_at,
        with_events=True,
    ).events
    starts = {event.name: event.start for event in events if event.lane == "compute"}
    ends = [event.end for event in events if event.lane == "compute" and event.name.startswith("forward ")]
    forward_end = max(ends, default=0.0)
    lane_out = _Lane([(event.start, event.end) for event in events if event.lane == "out"])
    sizes = deferred.buckets
    left: list[float] = []
    arrived = late = 0.0
    for number, (nbytes, op) in enumerate(zip(sizes, _dues(problem.uses, deferred), strict=True)):
        tick = bisect.bisect_right(problem.starts, op) - 1
        due = starts.get(f"forward {tick}", 0.0)
        place = left[number - deferred.num_slots] if number >= deferred.num_slots else 0.0
        arrived = max(arrived, place) + link.latency_seconds + nbytes / link.in_bytes_per_second
        late = max(late, arrived - due)
        left.append(lane_out.copy(due + late, link.latency_seconds + nbytes / link.out_bytes_per_second))
    exposed = late + max(0.0, max(left, default=0.0) - forward_end - late)
    copying = sum(
        2 * link.latency_seconds + nbytes / link.in_bytes_per_second + nbytes / link.out_bytes_per_second
        for nbytes in sizes
    )
    return DeferredCost(exposed_seconds=exposed, slowed_seconds=link.compute_share * copying)


def largest_layer(profile: Profile) -> float:
    """Of the gradients, and so of the state, the share that the largest layer has; 0 where there are none."""
    of_units: dict[int, int] = {}
    uses = _uses(profile, profile.layers)
    for op, nbytes in uses:
        of_units[op] = of_units.get(op, 0) + nbytes
    total = sum(of_units.values())
    return max(of_units.values(), default=0) / total if total else 0.0


def _dues(uses: Sequence[tuple[int, int]], deferred: DeferredState) -> list[int]:
    """For each bucket the forward operator before which its first parameter is needed."""
    ends = list(itertools.accumulate(nbytes for _, nbytes in uses))
    total = deferred.nbytes + deferred.resident_bytes
    dues, before = [], deferred.resident_bytes
    for nbytes in deferred.buckets:
        place = bisect.bisect_right(ends, before / total * ends[-1]) if ends else 0
        dues.append(max(uses[min(place, len(uses) - 1)][0], 0) if uses else 0)
        before += nbytes
    return dues


def _uses(profile: Profile, layers: Sequence[str]) -> list[tuple[int, int]]:
    """Where forward first needs parameters, and the bytes of their gradients, in order; `_NEVER` comes first."""
    units = frozenset(layers) - {""}
    num_forward = profile.num_forward_ops
    names = [_unit(name.rpartition(".")[0], units) for name in profile.op_names]
    first: dict[str, int] = {}
    for op, name in enumerate(names[:num_forward]):
        first.setdefault(name, op)
    made = np.diff(np.asarray(profile.op_gradient_bytes, dtype=np.int64), prepend=0)
    found: dict[int, int] = {}
    for op in np.flatnonzero(made > 0).tolist():
        place = first.get(names[op], _NEVER) if op >= num_forward else _NEVER
        found[place] = found.get(place, 0) + int(made[op])
    missing = profile.state.gradients - sum(found.values())
    if missing > 0:
        found[_NEVER] = found.get(_NEVER, 0) + missing
    return sorted(found.items())


def _unit(path: str, units: frozenset[str]) -> str:
    """The layer that a module is in, or the module."""
    parts = path.split(".")
    prefixes = itertools.accumulate(parts, lambda above, part: f"{above}.{part}")
    return next((prefix for prefix in prefixes if prefix in units), path)


class _Lane:
    """A lane that copies buckets in the gaps of what it has to do anyway."""

    def __init__(self, busy: Sequence[tuple[float, float]]) -> None:
        self._busy = sorted(busy)
        self._now = 0.0

    def copy(self, earliest: float, seconds: float) -> float:
        """End of a copy that may not start before `earliest`; copies are in order."""
        now = max(self._now, earliest)
        for start, end in self._busy:
            if end <= now:
                continue
            if start >= now + seconds:
                break
            seconds -= max(start - now, 0.0)
            now = end
        self._now = now + seconds
        return self._now
