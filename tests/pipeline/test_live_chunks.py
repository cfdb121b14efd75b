"""What a rank holds, moment by moment, beside random executions of the same schedules."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lowtide.pipeline.clock import with_transfers
from lowtide.pipeline.generators import GENERATORS, make_schedule
from lowtide.pipeline.live_chunks import live_chunks_of
from lowtide.pipeline.schedule import Kind, Result, Schedule
from tests.support.row_counts import peak_live_chunks

SEVERAL = [name for name in GENERATORS if name != "one_stage_overlap"]


def schedule_of(name: str, num_ranks: int) -> Schedule:
    return with_transfers(
        make_schedule(name, num_ranks=num_ranks, num_micro_batches=2 * num_ranks + 2 * (num_ranks > 2))
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "zb_v"])
def test_as_many_chunks_are_alive_as_the_figures_say(name: str, num_ranks: int) -> None:
    schedule = schedule_of(name, num_ranks)
    for rank, peak in enumerate(peak_live_chunks(schedule)):
        moments = live_chunks_of(schedule, rank, pairs_at_once=True)
        assert max(len(moment.running) + sum(number for _, number in moment.live) for moment in moments) == peak


def executed(schedule: Schedule, seed: int) -> list[tuple[int, tuple, Counter, Counter]]:
    """Of each action that computes, in an order that ranks of random speeds have: rank, what runs, chunks that are
    alive beside it, and messages that are in this rank's memory."""
    rng = random.Random(seed)
    at = [0] * schedule.num_ranks
    made: set[Result] = set()
    asked: list[set[Result]] = [set() for _ in at]
    gone: list[set[Result]] = [set() for _ in at]  # read by this rank
    sent: list[set[Result]] = [set() for _ in at]
    live: list[Counter] = [Counter() for _ in at]
    found = []
    while any(position < len(row) for position, row in zip(at, schedule.actions, strict=True)):
        rank = rng.randrange(schedule.num_ranks)
        if at[rank] == len(schedule.actions[rank]):
            continue
        every = schedule.actions[rank][at[rank]]
        parts = [part for part in every.parts if not part.kind.is_transfer and part.kind is not Kind.BACKWARD_WEIGHT]
        needed = {need for part in parts for need in schedule.needs(part) if need.stage != part.stage}
        if not needed <= made:
            continue
        at[rank] += 1
        asked[rank] |= {part.carries for part in every.parts if part.kind.is_receive}
        if not parts:
            continue
        gone[rank] |= needed
        for part in parts:
            live[rank][part.stage] -= part.kind is not Kind.FORWARD
        there = (asked[rank] & made | {r for r in made if schedule.reader(r) == rank and r in sent[rank]}) - gone[rank]
        read = set().union(*gone)
        kept = {result for result in sent[rank] if result not in read}
        running = tuple((part.stage, part.kind is Kind.FORWARD) for part in parts)
        messages = Counter((result.kind, result.stage) for result in there | kept)
        found.append((rank, running, Counter(live[rank]), messages))
        for part in parts:
            live[rank][part.stage] += part.kind is Kind.FORWARD
            result = part.makes
            if result is not None and schedule.reader(result) is not None:
                made.add(result)
                sent[rank].add(result)
    return found


@pytest.mark.parametrize("name", SEVERAL)
def test_no_execution_holds_more_than_some_moment_says(name: str) -> None:
    schedule = schedule_of(name, 4)
    moments = [live_chunks_of(schedule, rank, pairs_at_once=True) for rank in range(4)]
    for seed in range(6):
        for rank, running, live, messages in executed(schedule, seed):
            assert any(
                moment.running == running
                and live <= Counter(dict(moment.live))
                and messages <= Counter(dict(moment.messages))
                for moment in moments[rank]
            ), (rank, running, live, messages)


def test_weights_that_a_forward_reshards_are_away_until_the_next_backward() -> None:
    schedule = with_transfers(make_schedule("1f1b", num_ranks=2, num_micro_batches=2))
    moments = live_chunks_of(schedule, 0, pairs_at_once=False, reshards=[0])
    found = {(moment.running, moment.live[0][1], moment.resharded) for moment in moments}
    forward, backward = ((0, True),), ((0, False),)  # F0 F1 B0 B1
    assert found == {(forward, 0, ()), (forward, 1, (0,)), (backward, 1, (0,)), (backward, 0, ())}
    assert all(moment.resharded == () for moment in live_chunks_of(schedule, 0, pairs_at_once=False))
