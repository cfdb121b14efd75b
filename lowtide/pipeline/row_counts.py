"""What a schedule shows without a clock: chunks held, receives that wait, work that runs in pairs, order of sums."""

from __future__ import annotations

from lowtide.pipeline.schedule import RECEIVES, TRANSFERS, Kind, Pair, Schedule, carried_by


def peak_live_chunks(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, the most chunks whose activations it holds at once: from the start of a forward to the end of the
    full backward, or of the weight gradient where the backward is split. Holds for any durations."""
    peaks = []
    for row in schedule.actions:
        live = peak = 0
        for every in row:
            kinds = [action.kind for action in every.parts]
            live += kinds.count(Kind.FORWARD)
            peak = max(peak, live)
            live -= kinds.count(Kind.BACKWARD) + kinds.count(Kind.BACKWARD_WEIGHT)
        peaks.append(peak)
    return tuple(peaks)


def peak_receives(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, the most messages that it has asked for and not begun to read: the receive buffers that it needs
    beside its live chunks."""
    peaks = []
    for row in schedule.actions:
        waiting = set()
        peak = 0
        for every in row:
            for action in every.parts:
                if action.kind in RECEIVES:
                    waiting.add(carried_by(action))
                elif action.kind not in TRANSFERS:
                    waiting.difference_update(schedule.needs(action))
            peak = max(peak, len(waiting))
        peaks.append(peak)
    return tuple(peaks)


def paired_share(schedule: Schedule) -> tuple[float, ...]:
    """Of each rank, the share of its forwards and backwards that run in pairs. No overlap of communication with the
    other half of a pair can hide a larger share of it: a figure of overlap means nothing without this one."""
    shares = []
    for rank, row in enumerate(schedule.actions):
        num_pairs = sum(isinstance(action, Pair) for action in row)
        shares.append(num_pairs / (schedule.num_micro_batches * len(schedule.stages_of(rank))))
    return tuple(shares)


def is_in_order(schedule: Schedule) -> bool:
    """Whether every stage adds up its weight gradients in the order of the micro-batches. Then sums are those of one
    process that does the micro-batches one after another, to the bit; else only up to rounding."""
    last: dict[int, int] = {}
    for row in schedule.actions:
        for every in row:
            for action in every.parts:
                if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    if action.micro_batch < last.get(action.stage, 0):
                        return False
                    last[action.stage] = action.micro_batch
    return True
