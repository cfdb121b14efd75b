"""What a whole row of a schedule shows: chunks in flight, pairs, and the bubble of a played step."""

from __future__ import annotations

from lowtide.pipeline.clock import Played
from lowtide.pipeline.live_chunks import live_mixes
from lowtide.pipeline.schedule import Pair, Schedule


def peak_live_chunks(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, the most chunks whose activations it holds at once. Holds for any durations."""
    return tuple(max(map(sum, live_mixes(schedule, rank)), default=0) for rank in range(schedule.num_ranks))


def paired_share(schedule: Schedule) -> tuple[float, ...]:
    """Of each rank, the share of its forwards and backwards that run in pairs."""
    shares = []
    for rank, row in enumerate(schedule.actions):
        num_pairs = sum(isinstance(action, Pair) for action in row)
        shares.append(num_pairs / (schedule.num_micro_batches * len(schedule.stages_of(rank))))
    return tuple(shares)


def bubble_of(played: Played) -> tuple[float, ...]:
    """What each rank does not compute of the step. This is the published measure."""
    return tuple(played.step_seconds - busy for busy in played.busy_seconds)
