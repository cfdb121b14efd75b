"""What an overlap is worth: its figures with a clock, and a prediction of them.

What: `Overlap` (lowtide/pipeline/overlap.py) logs `Event`s. `replay` plays a log on a clock, with given durations of
segments and a link, and so predicts a step. Three figures say which share of the exchanges is hidden:
- `hidden_share` (R_e2e): of the time that the exchanges cost when nothing hides them, how much the overlap saved. It
  takes three runs (no exchanges, in series, overlapped) and counts everything, contention too. The headline.
- `Replayed.hidden_share` (R_wait): of the time that the link was busy, how much nobody waited for.
- `traced_share` (R_trace): of the time that the link was busy, how much ran while something computed. What profilers
  show; any compute counts, needed or slowed down.
`hidden_share_by_phase` says R_wait for each of the eight phases of DualPipeV.
None may be compared with another, nor said without the ceiling: `pair_ceiling` for W ranks and M micro-batches.
`predict_step` plays a whole schedule, from one exchange to the next.

`seconds_of` takes durations from a log that was stamped. Times are whatever the durations are in.
Cost: some us an event.
Not covered: links that several exchanges share at once, compute that a running exchange slows down.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lowtide.pipeline.overlap import BACKWARD, FORWARD, OTHER, Event
from lowtide.pipeline.schedule import Action, Kind, Result, Schedule

# -- shares ------------------------------------------------------------------------------------------------------------


def hidden_share(*, without_seconds: float, serial_seconds: float, overlapped_seconds: float) -> float:
    """R_e2e: 1 where the overlapped step is as long as one without exchanges, 0 where as long as one in series."""
    return 1 - (overlapped_seconds - without_seconds) / (serial_seconds - without_seconds)


def traced_share(communication: Sequence[tuple[float, float]], compute: Sequence[tuple[float, float]]) -> float:
    """R_trace, from intervals (start, end) of a trace. Intervals of one kind may overlap; they count once."""
    ours, theirs = _union(communication), _union(compute)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ours for b in theirs)
    return both / sum(end - start for start, end in ours)


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def pair_ceiling(num_ranks: int, num_micro_batches: int) -> tuple[float, ...]:
    """Of each rank of DualPipeV, the share of its chunk passes that run in pairs: with M micro-batches on W ranks,
    (2M - 3W + r + 1) / 2M on rank r, one pair less on the last."""
    doubled = 2 * num_micro_batches
    last = num_ranks - 1
    return tuple((doubled - 3 * num_ranks + r + 1 - (r == last)) / doubled for r in range(num_ranks))


# -- a prediction ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that carries one exchange after the other: alpha + bytes / beta."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_seconds + nbytes / self.bytes_per_second


def seconds_of(stamped: Sequence[tuple[float, Event]], began_seconds: float) -> list[tuple[Event, float]]:
    """Events of a log that was stamped with a clock, and what each took: compute for a segment, waiting for a wait.
    `began_seconds`: when the first half began."""
    last, found = began_seconds, []
    for now, event in stamped:
        if event.kind != "counts":
            found.append((event, now - last))
            last = now
    return found


def phases_of_dualpipev(num_ranks: int, num_micro_batches: int, rank: int) -> tuple[int, ...]:
    """Of each forward, backward and pair of a rank, in order, the phase of the schedule that it is in, from 1 to 8: the
    loops of `generators.dualpipev`. Weight gradients that come by themselves are left out."""
    left, own = num_ranks - rank - 1, rank + 1
    # The main part begins apart on the last rank.
    main = 2 * (num_micro_batches - 2 * num_ranks + own) + (rank == num_ranks - 1)
    sizes = (2 * left, 2 * own, 2 * left, main, 2 * left, 2 * own, left)
    found = [phase for phase, size in enumerate(sizes, 1) for _ in range(size)]
    num_actions = 4 * num_micro_batches - _num_pairs(num_ranks, num_micro_batches, rank)
    return (*found, *(8 for _ in range(num_actions - len(found))))


def _num_pairs(num_ranks: int, num_micro_batches: int, rank: int) -> int:
    return round(pair_ceiling(num_ranks, num_micro_batches)[rank] * 2 * num_micro_batches)


def hidden_share_by_phase(
    phases: Sequence[int], took: Iterable[tuple[Event, float]], exchange_seconds: float
) -> dict[int, float]:
    """R_wait of each phase that has exchanges: of the time that they were on their way, how much nobody waited for.

    `phases`: of the actions of one step, in the order in which they ran. `took`: that step's log (`seconds_of`)."""
    busy: dict[int, float] = {}
    waited: dict[int, float] = {}
    first: int | None = None
    for event, seconds in took:
        first = event.pair if first is None else first
        phase = phases[event.pair - first]
        if event.kind == "issue":
            busy[phase] = busy.get(phase, 0.0) + exchange_seconds
        elif event.kind == "wait":
            waited[phase] = waited.get(phase, 0.0) + seconds
    return {phase: 1 - waited.get(phase, 0.0) / total for phase, total in sorted(busy.items())}


@dataclass(frozen=True, slots=True)
class Replayed:
    """A log on a clock."""

    step_seconds: float
    compute_seconds: float
    link_seconds: float
    """Busy with exchanges."""
    wait_seconds: float
    """Spent in waits."""

    @property
    def hidden_share(self) -> float:
        """R_wait."""
        return 1 - self.wait_seconds / self.link_seconds

    @property
    def serial_seconds(self) -> float:
        """Of the same step if every exchange were waited for at once."""
        return self.compute_seconds + self.link_seconds


def replay(
    log: Iterable[Event], segment_seconds: Callable[[Event], float], exchange_seconds: Callable[[Event], float]
) -> Replayed:
    """Play what the engine really did: one compute lane, one link, in the order of `log`.

    segment_seconds: of the compute that a `segment` event is the end of. exchange_seconds: of the exchange that an
    `issue` starts.
    """
    now = link_free = compute = busy = waited = 0.0
    ends: dict[tuple[int, str, int], float] = {}
    for event in log:
        key = (event.pair, event.half, event.number)
        if event.kind == "segment":
            seconds = segment_seconds(event)
            now, compute = now + seconds, compute + seconds
        elif event.kind == "issue":
            seconds = exchange_seconds(event)
            ends[key] = link_free = max(link_free, now) + seconds
            busy += seconds
        elif event.kind == "wait":
            end = ends.pop(key)
            waited += max(0.0, end - now)
            now = max(now, end)
    return Replayed(now, compute, busy, waited)


# -- a pair in a schedule ----------------------------------------------------------------------------------------------


def pair_order(num_forward: int, num_backward: int) -> list[Event]:
    """What `Overlap` logs for a pair whose halves have so many exchanges, each waited for where it is started. Of each
    half, segments with an odd number are empty: they stand between a start and its wait."""
    log: list[Event] = []
    steps = {FORWARD: _half_steps(FORWARD, num_forward), BACKWARD: _half_steps(BACKWARD, num_backward)}
    half = BACKWARD
    while steps:
        found = next(steps[half], None)
        if found is None:
            del steps[half]
        else:
            log += found
        half = OTHER[half] if OTHER[half] in steps else half
    return log


def _half_steps(half: str, num: int) -> Iterator[list[Event]]:
    """What a half logs from one wait to the next."""
    events = [Event(0, half, "segment", 0)]
    for number in range(num):
        yield [*events, Event(0, half, "issue", number), Event(0, half, "segment", 2 * number + 1)]
        events = [Event(0, half, "wait", number), Event(0, half, "segment", 2 * number + 2)]
    yield events


Move = tuple[str, float, float]
"""A segment, an issue or a wait; seconds; seconds of weight gradients that it puts off. Waits are in order of issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """What one stage computes for one micro-batch, between its exchanges."""

    forward_seconds: tuple[float, ...]
    """Of each stretch between two exchanges, one more than exchanges."""
    backward_seconds: tuple[float, ...]
    """The same of the full backward."""
    weight_seconds: tuple[float, ...]
    """Of these: what computes gradients of weights, and can be put off."""
    exchange_seconds: float
    """Of each exchange."""
    num_parts: int = 1
    """Of the experts, whose stretches have odd numbers: each part has exchanges of its own."""
    shared_share: float = 0.0
    """Of a stretch of experts: what shared ones take, which wait for no rows."""
    host_seconds: float = 0.0
    """Of a stretch of experts: what the host takes for it. Each part and the shared ones take it again."""

    def moves(self, half: str, *, puts_off: bool) -> Iterator[Move]:
        """What a half does, in order, as the blocks of `split_experts`."""
        seconds = self.forward_seconds if half == FORWARD else self.backward_seconds
        weights = self.weight_seconds if puts_off else (0.0,) * len(seconds)
        for number, (whole, weight) in enumerate(zip(seconds, weights, strict=True)):
            if number % 2 == 0:
                yield "segment", whole - weight, weight
                yield from [("issue", self.exchange_seconds / self.num_parts, 0.0)] * (
                    self.num_parts if number + 1 < len(seconds) else 0
                )
                continue
            own, shared = (
                ("segment", self.host_seconds + share * (whole - weight - self.host_seconds), share * weight)
                for share in ((1 - self.shared_share) / self.num_parts, self.shared_share)
            )
            part = (("wait", 0.0, 0.0), own, ("issue", self.exchange_seconds / self.num_parts, 0.0))
            around = [*part * self.num_parts]
            beside = [shared] if self.shared_share else []
            yield from [*beside, *around] if half == FORWARD else [*around, *beside]
            yield from [("wait", 0.0, 0.0)] * self.num_parts


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step of a pipeline without exchanges, with all of them in series, and with overlapped pairs."""

    without_seconds: float
    serial_seconds: float
    overlapped_seconds: float

    @property
    def hidden_share(self) -> float:
        """R_e2e."""
        return hidden_share(
            without_seconds=self.without_seconds,
            serial_seconds=self.serial_seconds,
            overlapped_seconds=self.overlapped_seconds,
        )


def predict_step(schedule: Schedule, times: ChunkTimes, *, most_kept: int | None = None) -> PredictedStep:
    """The schedule on a clock, three times. All stages take the same. most_kept: as of `WeightGradients`, of the step
    with overlap."""
    alone = dataclasses.replace(times, exchange_seconds=0)
    return PredictedStep(
        without_seconds=step_seconds(schedule, alone, overlaps=False),
        serial_seconds=step_seconds(schedule, times, overlaps=False),
        overlapped_seconds=step_seconds(schedule, times, overlaps=True, most_kept=most_kept),
    )


def step_seconds(schedule: Schedule, times: ChunkTimes, *, overlaps: bool, most_kept: int | None = None) -> float:
    """Rank by rank, each as far as what it reads is there. A result is there when its half ends."""
    step = _Step(schedule, times, overlaps, most_kept, {}, [0.0] * schedule.num_ranks)
    ranks = [step.rank(number) for number in range(schedule.num_ranks)]
    while ranks:
        num_made = len(step.made)
        going = [rank for rank in ranks if next(rank, None) is not None]
        assert len(step.made) > num_made or len(going) < len(ranks), "a schedule that stands still: verify it first"
        ranks = going
    return max(step.ends)


@dataclass(frozen=True, slots=True)
class _Step:
    """A schedule on a clock."""

    schedule: Schedule
    times: ChunkTimes
    overlaps: bool
    most_kept: int | None
    made: dict[Result, float]
    """When."""
    ends: list[float]
    """Of the ranks."""

    def rank(self, number: int) -> Iterator[Result]:
        """Gives what a rank waits for, until that was made. Backward begins a pair; halves take turns at exchanges."""
        now = link_free = 0.0
        put_off: deque[tuple[tuple[int, int], float]] = deque()
        """Chunks, and what computes the gradients of weights that they put off between two exchanges."""
        parts = [part for every in self.schedule.actions[number] for part in every.parts]
        split = {(part.stage, part.micro_batch) for part in parts if part.kind is Kind.BACKWARD_WEIGHT}
        for every in self.schedule.actions[number]:
            for need in (need for part in every.parts for need in self.schedule.needs(part)):
                while need not in self.made:
                    yield need
                now = max(now, self.made[need])
            for group in [every.parts] if self.overlaps else [(part,) for part in every.parts]:
                halves = deque(
                    (part, deque(self._moves(part, (part.stage, part.micro_batch) in split)))
                    for part in sorted(group, key=lambda part: part.kind is Kind.FORWARD)
                    if part.kind is not Kind.BACKWARD_WEIGHT
                )
                due: defaultdict[Action, deque[float]] = defaultdict(deque)
                """When exchanges that nobody has waited for yet are there."""
                standing: set[Action] = set()
                while halves:
                    part, left = halves[0]
                    if part in standing:
                        standing.remove(part)
                        now = max(now, due[part].popleft())
                    if not left:
                        halves.popleft()
                        result = part.makes
                        self.made.update({} if result is None else {result: now})
                        continue
                    kind, seconds, weight = left.popleft()
                    if kind == "segment":
                        now += seconds
                        put_off += [((part.stage, part.micro_batch), weight)] * (weight > 0)
                    elif kind == "issue":
                        link_free = max(link_free, now) + seconds
                        due[part].append(link_free)
                    else:
                        standing.add(part)
                        if len(halves) > 1:
                            halves.rotate()
                        elif self.most_kept is not None and put_off:
                            now += put_off.popleft()[1]
                due_now = {(part.stage, part.micro_batch) for part in group if part.kind is Kind.BACKWARD_WEIGHT}
                kept = [chunk for chunk in dict.fromkeys(chunk for chunk, _ in put_off) if chunk not in split]
                due_now.update(kept[: max(0, len(kept) - (self.most_kept or 0))])
                while any(chunk in due_now for chunk, _ in put_off):
                    now += put_off.popleft()[1]
        self.ends[number] = now + sum(seconds for _, seconds in put_off)

    def _moves(self, part: Action, is_split: bool) -> Iterator[Move]:
        half = FORWARD if part.kind is Kind.FORWARD else BACKWARD
        puts_off = half == BACKWARD and (is_split or self.most_kept is not None)
        times = self.times if self.overlaps else dataclasses.replace(self.times, num_parts=1, shared_share=0.0)
        return times.moves(half, puts_off=puts_off)
