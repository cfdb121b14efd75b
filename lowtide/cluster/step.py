"""One optimizer step of a layout: what each action takes, what pairs hide, and the pipeline on its clock.

What: `StageTimes` has the times of one chunk of a stage, or of a part of it; `step_seconds_of` plays the schedule
(pipeline/clock.py) with them and says where the time goes, on the rank that works most: compute, recompute, stalls,
collectives of tensor and context ranks, the experts' all-to-all that nothing hides, waiting (the bubble), gradients and
weights between the ranks that share them, and the optimizer.
A pair of a forward and a backward takes as long as its compute, slowed by the cluster's `overlap_share` for as long as
its all-to-all lasts, or as long as its all-to-all where that is longer.

Assumed: nothing hides collectives of tensor ranks, nor gradients' exchange at the end of the step; hand-overs between
stages run beside compute (they count where a rank waits for them).
Not covered: shared experts that hide an all-to-all of their own micro-batch, an exchange spread over the backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lowtide.cluster.layout import Schedules
from lowtide.pipeline.clock import play
from lowtide.pipeline.schedule import AnyAction, Kind, Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one chunk of a stage on one rank, or of one operator of it."""

    forward: float
    backward_input: float
    backward_weight: float = 0.0
    collective: float = 0.0
    """Of the forward; the backward has as much."""
    exchange: float = 0.0
    """All-to-all of the forward; the backward has as much."""
    recompute: float = 0.0
    """Of one chunk, in its backward, collectives included."""
    recompute_exchange: float = 0.0
    stall: float = 0.0

    @property
    def ahead(self) -> float:
        """The forward without its all-to-all."""
        return self.forward + self.collective

    @property
    def back(self) -> float:
        """The backward without its all-to-all."""
        return self.backward_input + self.backward_weight + self.collective + self.recompute + self.stall

    @property
    def compute(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    @property
    def plain(self) -> float:
        """One after the other, with everything kept."""
        return self.compute + 2 * (self.collective + self.exchange)


def total(parts: Iterable[StageTimes]) -> StageTimes:
    """Of all of them, one after the other."""
    found = [*parts]
    return StageTimes(**{name: sum(getattr(part, name) for part in found) for name in StageTimes.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one optimizer step on the rank that works most. They add up."""

    compute: float
    recompute: float
    stall: float
    collective: float
    exchange: float
    """All-to-all that is not hidden, and what compute loses beside the rest."""
    bubble: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def durations(stages: Sequence[StageTimes], overlap_share: float) -> Callable[[AnyAction], float]:
    """Of actions, for `play`."""

    def seconds_of(action: AnyAction) -> float:
        if isinstance(action, Pair):
            forward, backward = (stages[part.stage] for part in action.parts)
            exchange = forward.exchange + backward.exchange + backward.recompute_exchange
            return max(forward.ahead + backward.back + overlap_share * exchange, exchange)
        stage = stages[action.stage]
        if action.kind is Kind.FORWARD:
            return stage.ahead + stage.exchange
        if action.kind is Kind.BACKWARD_WEIGHT:
            return stage.backward_weight
        seconds = stage.back + stage.exchange + stage.recompute_exchange
        return seconds if action.kind is Kind.BACKWARD else seconds - stage.backward_weight

    return seconds_of


def least_seconds(stages: Sequence[StageTimes], overlap_share: float, *, has_pairs: bool) -> float:
    """What a rank with these stages needs at least for one micro-batch."""
    busy = sum(stage.compute + 2 * stage.collective for stage in stages)
    exchange = sum(2 * stage.exchange for stage in stages)
    return max(busy + overlap_share * exchange, exchange) if has_pairs else busy + exchange


def step_seconds_of(
    schedules: Schedules,
    stages: Sequence[StageTimes],
    overlap_share: float,
    num_micro_batches: int,
    *,
    transfer_seconds: float,
    gradients: float,
    optimizer: float,
) -> StepSeconds:
    """Where the time of one step goes."""
    seconds_of = durations(stages, overlap_share)
    played = play(schedules.schedule, seconds_of, transfer_seconds=transfer_seconds)
    seconds, busy_seconds = played.step_seconds, played.busy_seconds
    rank = max(range(len(busy_seconds)), key=busy_seconds.__getitem__)
    busy = busy_seconds[rank]
    if schedules.shorter is not None:
        before = play(schedules.shorter, seconds_of, transfer_seconds=transfer_seconds)
        few, fewer = schedules.schedule.num_micro_batches, schedules.shorter.num_micro_batches
        rounds = (num_micro_batches - few) / (few - fewer)
        seconds += rounds * (seconds - before.step_seconds)
        busy += rounds * (busy - before.busy_seconds[rank])
    mine = total(stages[stage] for stage in schedules.schedule.stages_of(rank))
    each = (mine.compute, mine.recompute, mine.stall, 2 * mine.collective)
    compute, recompute, stall, collective = (num_micro_batches * value for value in each)
    told = compute + recompute + stall + collective
    shown = busy - told if busy > told * (1 + 1e-9) else 0.0
    return StepSeconds(
        compute=compute,
        recompute=recompute,
        stall=stall,
        collective=collective,
        exchange=shown,
        bubble=max(0.0, seconds - told - shown),
        gradients=gradients,
        optimizer=optimizer,
    )
