"""Every result is sent right after it was made and asked for when it is made; a rank hands over to itself without.

That no order of transfers swaps messages or stands still is proven in test_verify.py.
"""

from __future__ import annotations

import random

import pytest

from lowtide.pipeline.clock import play, with_transfers
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import to_csv
from lowtide.pipeline.verify import verify
from tests.support.receives import peak_receives

OF_SEVERAL_RANKS = ("gpipe", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev")


def test_a_small_schedule_by_hand() -> None:
    schedule = with_transfers(make_schedule("1f1b", num_ranks=2, num_micro_batches=2))
    assert to_csv(schedule).splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]


def test_the_turn_of_a_v_is_handed_over() -> None:
    last = with_transfers(make_schedule("dualpipev", num_ranks=3, num_micro_batches=6)).actions[-1]
    transfers = {(action.kind, action.stage) for every in last for action in every.parts if action.kind.is_transfer}
    assert {stage for _, stage in transfers} == {2, 3}
    assert {str(kind) + str(stage) for kind, stage in transfers} == {"RECV_F2", "SEND_B2", "SEND_F3", "RECV_B3"}


@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
def test_sends_follow_their_maker_and_receives_stand_where_the_data_is_made(name: str) -> None:
    schedule = make_schedule(name, num_ranks=4, num_micro_batches=8)
    played = play(schedule)
    ends = {part.makes: timed.end for row in played.rows for timed in row for part in timed.action.parts}
    starts = {timed.action: timed.start for row in played.rows for timed in row}
    for row in with_transfers(schedule).actions:
        for index, every in enumerate(row):
            kind = every.parts[0].kind
            if kind.is_send:
                before = next(other for other in reversed(row[:index]) if not other.parts[0].kind.is_transfer)
                assert every.carries in [part.makes for part in before.parts]
            elif kind.is_receive:
                before = [starts[other] for other in row[:index] if other in starts]
                after = [starts[other] for other in row[index:] if other in starts]
                assert max(before, default=-1) < ends[every.carries] <= min(after)


@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
def test_any_durations_give_a_schedule_that_can_be_carried_out(name: str) -> None:
    """With fractions too, whose sums are rounded."""
    rng = random.Random(name)
    for _ in range(5):
        schedule = make_schedule(name, num_ranks=3, num_micro_batches=6)
        seconds = {action: rng.choice((0.1, 0.2, 0.3, 0.7)) for row in schedule.actions for action in row}
        verify(with_transfers(schedule, seconds.__getitem__))


def test_few_receives_wait_at_once() -> None:
    """Torch allocates one buffer for each micro-batch and boundary, here 32 x 4, and keeps them."""
    schedule = with_transfers(make_schedule("dualpipev", num_ranks=8, num_micro_batches=32))
    assert max(peak_receives(schedule)) <= 8
