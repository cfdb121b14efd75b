"""What each mode of moving an optimizer's state costs: its copies on the lanes of a step that was played.

What: `play_traffic` takes a played step, cuts the state that is elsewhere between steps into buckets, and lays for each
bucket a fetch, its update and a copy back on the two lanes, in the gaps that the activations' copies leave. A bucket
is fetched when there is a place for it, updated when it has arrived and its gradient is there, and leaves its place
when its copy back has landed. What compute then waits for is the exposed time:

    exposed = max(0, time of the transfer - time that the mode hides)

mode         buckets may be fetched                  updated                       hidden beside
step         when the step of the optimizer begins   in the step                   the last copies back: next forward
backward     in the last backward pass, as soon as   in the step                   backward; copies back: next forward
             memory that it has freed takes them
in_backward  in the last backward pass               when its gradient is there    backward

Rules: copies of activations have deadlines and go first; both directions run at once; updates take no time of their own
(plain's optimizer takes that time too, so nothing is added); a copy beside compute slows it by `compute_share`, as all
copies do; the next forward begins when the last update is done, and waits where memory needs a place that has not been
left yet. The step repeats: what is sent back in "the next forward" meets the copies of the forward that was played.
A gradient goes with its bucket's update. That forward has no gradients of micro-batches before it.

The planner places state by a model of its own (lowtide/planner/state_items.py), which changes the plan of the
activations too; this one takes the plan as it is, knows all three modes and single buckets, and so stands beside it.
Why a played step, and no formula: a formula (optimizer-state swap: exposed = s P / (N BW) - what is hidden) knows
neither when backward frees memory nor when the lanes are busy with activations. In an empty step both agree.
Cost: some microseconds for each bucket. Not covered: memory of `in_backward`, of
which the caller counts slots and gradients in the step (planner/in_backward.py); host memory that is slower than the
link, and what it takes the host to issue the copies.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.decisions import Overlap
from lowtide.timeline.events import Timeline
from lowtide.timeline.step import Link, Step

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTraffic:
    """State that is elsewhere between steps."""

    moved_bytes: int
    bucket_bytes: int
    num_slots: int
    """Places for buckets that the step of the optimizer has at least; its tick counts them already."""
    overlap: Overlap
    earlier_bytes: int = 0
    """Of gradients of earlier micro-batches, which the played curve has in each tick."""

    @property
    def buckets(self) -> list[int]:
        """Sizes, in order of use; the last one may be smaller."""
        whole, rest = divmod(self.moved_bytes, self.bucket_bytes)
        return [self.bucket_bytes] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficCost:
    """What of it compute feels, once a step of the optimizer."""

    exposed_seconds: float
    """Compute waits: for buckets, or for places that buckets have not left yet."""
    slowed_seconds: float
    """Compute beside which buckets are copied takes that much longer."""
    prefetched_bytes: int
    """Fetched before the step of the optimizer begins."""
    held: tuple[int, ...]
    """Bytes of buckets on the device in each tick, beyond the slots that the last tick counts."""
    free_share: float | None
    """The step times this would hide everything, if memory took it; None: no length of the step would."""

    @property
    def seconds(self) -> float:
        """All that it adds to a step of the optimizer."""
        return self.exposed_seconds + self.slowed_seconds


def play_traffic(
    step: Step, timeline: Timeline, link: Link, traffic: StateTraffic, budget_bytes: int | None
) -> TrafficCost:
    """The cost of `traffic` beside `timeline`, which was played with events. The last tick is the optimizer's."""
    assert traffic.moved_bytes > 0
    frame = _Frame(step, timeline, link, traffic, budget_bytes)
    at_end = [frame.end] * len(frame.sizes)
    if traffic.overlap == "in_backward":
        late = frame.travel(release=[frame.turn] * len(at_end), ready=frame.gradient_times(), due=at_end)
    else:
        release = frame.places_in_backward() if traffic.overlap == "backward" else at_end
        late = frame.travel(release=release, ready=at_end, due=at_end)
    return frame.cost(late, frame.drain(late))


class _Frame:
    """One step on the clock, seconds from its start; what comes after `end` belongs to the step after it."""

    def __init__(
        self, step: Step, timeline: Timeline, link: Link, traffic: StateTraffic, budget_bytes: int | None
    ) -> None:
        num_forward = step.num_forward_ticks
        spans = {event.name: (event.start, event.end) for event in timeline.events if event.lane == "compute"}
        self.traffic = traffic
        self.link = link
        self.compute_share = link.compute_share
        self.budget_bytes = budget_bytes
        self.sizes = traffic.buckets
        self.in_seconds = [link.latency_seconds + size / link.in_bytes_per_second for size in self.sizes]
        self.out_seconds = [link.latency_seconds + size / link.out_bytes_per_second for size in self.sizes]
        self.curve = np.array(timeline.curve, np.int64)
        self.forward = [spans[f"forward {tick}"] for tick in range(num_forward)]
        self.backward = [spans[f"backward {tick}"] for tick in range(len(step.ticks) - num_forward - 1)]
        self.next = [*self.forward, *self.backward]
        """The ticks of the step after it, from its start; `drain` adds what they wait."""
        self.end = timeline.step_seconds
        self.turn = self.backward[0][0] if self.backward else self.end
        self.out_busy = [(event.start, event.end) for event in timeline.events if event.lane == "out"]
        self.in_busy = [(event.start, event.end) for event in timeline.events if event.lane == "in"]
        self.fetches: list[Span] = []
        self.sends: list[Span] = []

    # -- when ------------------------------------------------------------------------------------------------------

    @property
    def num_places(self) -> int:
        """Buckets that the device takes at once: what the mode allows, and memory in the step of the optimizer."""
        traffic = self.traffic
        if traffic.overlap in ("step", "in_backward"):
            return traffic.num_slots
        if self.budget_bytes is None:
            return max(len(self.sizes), traffic.num_slots)
        spare = self.budget_bytes - int(self.curve[-1])
        return traffic.num_slots + max(spare, 0) // traffic.bucket_bytes

    def places_in_backward(self) -> list[float]:
        """For each bucket the start of the backward tick from which on memory has room for it and all before it; for
        those that find none the end of the step."""
        if self.budget_bytes is None:
            return [self.turn] * len(self.sizes)
        num_forward, num_places = len(self.forward), self.num_places
        later_peaks = np.maximum.accumulate(self.curve[num_forward:-1][::-1])[::-1]
        ticks = np.searchsorted(self.budget_bytes - later_peaks, np.cumsum(self.sizes))
        starts = [*(start for start, _ in self.backward), self.end]
        return [starts[tick] if number < num_places else self.end for number, tick in enumerate(ticks.tolist())]

    def gradient_times(self) -> list[float]:
        """When backward has made each bucket's gradients, taken to be spread evenly over it."""
        made = np.cumsum(self.sizes) / self.traffic.moved_bytes
        return (self.turn + made * (self.end - self.turn)).tolist()

    # -- the lanes -------------------------------------------------------------------------------------------------

    def travel(self, *, release: Sequence[float], ready: Sequence[float], due: Sequence[float]) -> float:
        """Fetch, update and send back every bucket; how long compute waits for updates.

        A bucket is fetched after `release`, updated after `ready`, and compute waits for it at `due`.
        """
        into = _Lane(self.in_busy)
        # Before the step is over, nothing else is sent back any more; in the next forward it is.
        out = _Lane([(start + self.end, end + self.end) for start, end in self.out_busy] if due[-1] > self.end else ())
        num_places = self.num_places
        late = 0.0
        for number in range(len(self.sizes)):
            left = self.sends[number - num_places][1] if number >= num_places else 0.0
            self.fetches.append(into.copy(max(release[number], left), self.in_seconds[number]))
            updated = max(self.fetches[-1][1], ready[number])
            self.sends.append(out.copy(updated, self.out_seconds[number]))
            late = max(late, updated - due[number])
        return late

    def drain(self, exposed: float) -> float:
        """Send back in the next step what is left; how long compute waits there for places."""
        start = self.end + exposed
        out = _Lane([(begin + start, end + start) for begin, end in self.out_busy])
        left = [number for number, (_, end) in enumerate(self.sends) if end > start]
        for number in left:
            begin = self.sends[number][0]
            _, end = out.copy(max(begin, start), self.out_seconds[number] - max(start - begin, 0.0))
            self.sends[number] = (begin, end)
        if self.budget_bytes is None or not left:
            return 0.0
        # Before each of them has landed, so many bytes are there.
        there = np.cumsum([self.sizes[number] for number in reversed(left)])[::-1]
        stalled = 0.0
        curve = self._curve_of_the_next()
        for tick, ((begin, stop), nbytes) in enumerate(zip(self.next, curve, strict=False)):
            too_many = int((there > self.budget_bytes - nbytes).sum())
            if too_many:
                stalled = max(stalled, self.sends[left[too_many - 1]][1] - start - begin)
            self.next[tick] = (begin + stalled, stop + stalled)
        return stalled

    def _curve_of_the_next(self) -> list[int]:
        """Bytes in each tick of the step after it, without its buckets. It has no gradients before its backward makes
        them, evenly over its time."""
        length = max(self.end - self.turn, 1e-12)
        made = [min(max(stop - self.turn, 0.0) / length, 1.0) for _, stop in (*self.forward, *self.backward)]
        curve = self.curve[: len(made)] - self.traffic.earlier_bytes * (1.0 - np.array(made))
        return curve.astype(np.int64).tolist()

    # -- what comes of it ------------------------------------------------------------------------------------------

    def cost(self, exposed: float, stalled: float) -> TrafficCost:
        """`exposed` until the last update, `stalled` after it."""
        begin, end = self.end, self.end + exposed
        copying = sum(self.in_seconds) + sum(self.out_seconds)
        alone = sum(max(0.0, min(last, end) - max(first, begin)) for first, last in (*self.fetches, *self.sends))
        beside = max(copying - alone, 0.0)
        prefetched = (size for size, (start, _) in zip(self.sizes, self.fetches, strict=True) if start < begin)
        return TrafficCost(
            exposed_seconds=exposed + stalled,
            slowed_seconds=beside * self.compute_share,
            prefetched_bytes=sum(prefetched),
            held=self._held(end),
            free_share=self._free_share(),
        )

    def _held(self, end: float) -> tuple[int, ...]:
        """A bucket is there from the start of its fetch to the end of its copy back."""
        came, went = np.array([start for start, _ in self.fetches]), np.array([end for _, end in self.sends])
        before = np.cumsum([0, *self.sizes])

        def there(start: Sequence[float], stop: Sequence[float]) -> list[int]:
            """Bytes that came before `stop` and had not gone at `start`."""
            nbytes = before[np.searchsorted(came, stop)] - before[np.searchsorted(went, start, side="right")]
            return np.maximum(nbytes, 0).tolist()

        left = there([end + start for start, _ in self.next], [np.inf] * len(self.next))
        come = [0] * len(self.forward) + there(
            [start for start, _ in self.backward], [stop for _, stop in self.backward]
        )
        moments = [self.end, *came[came >= self.end].tolist()]
        most = max(there(moments, np.nextafter(moments, np.inf).tolist()))
        slots = min(self.traffic.num_slots * self.traffic.bucket_bytes, self.traffic.moved_bytes)
        return (*(one + other for one, other in zip(left, come, strict=True)), max(most - slots, 0))

    def _free_share(self) -> float | None:
        overlap = self.traffic.overlap
        if overlap == "step" or (overlap == "backward" and self.num_places < len(self.sizes)):
            return None
        forward, backward = self.turn, self.end - self.turn
        gap_in = backward - _length(self.in_busy)
        gap_out = backward if overlap == "in_backward" else forward - _length(self.out_busy)
        if gap_in <= 0 or gap_out <= 0:
            return None
        return max(sum(self.in_seconds) / gap_in, sum(self.out_seconds) / gap_out)


class _Lane:
    """A lane that works on buckets in the gaps of what it has to do anyway."""

    def __init__(self, busy: Iterable[Span]) -> None:
        self._busy = sorted(busy)
        self._ends = [end for _, end in self._busy]
        self._now = 0.0

    def copy(self, earliest: float, seconds: float) -> Span:
        """Start and end of a copy that may not start before `earliest`; copies are in order."""
        now = max(self._now, earliest)
        place = bisect.bisect_right(self._ends, now)
        begin = None
        while place < len(self._busy) and self._busy[place][0] < now + seconds:
            start, end = self._busy[place]
            if start > now:
                begin = now if begin is None else begin
                seconds -= start - now
            now = end
            place += 1
        begin = now if begin is None else begin
        self._now = now + seconds
        return begin, self._now


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
