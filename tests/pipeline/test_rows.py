"""The rows of DualPipeV for 4 ranks and 10 micro-batches, which others keep as a file, and what holds for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import Kind, Pair, Schedule
from lowtide.pipeline.verify import verify
from tests.pipeline.torch_oracle import rows_of

GOLDEN = Path(__file__).parent / "golden" / "dualpipev-4-10.csv"


def _rows(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.actions]


def test_four_ranks_and_ten_micro_batches() -> None:
    """In our file, and row by row what torch's own generator makes."""
    rows = _rows(make_schedule("dualpipev", num_ranks=4, num_micro_batches=10))
    assert rows == [line.split(",") for line in GOLDEN.read_text().split()]
    assert rows == [list(map(str, row)) for row in rows_of("dualpipev", 4, 10).values()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 2, 5])
def test_what_holds_for_every_row(num_ranks: int, more: int) -> None:
    num_micro_batches = 2 * num_ranks + more
    schedule = make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    verify(schedule)
    for rank, row in enumerate(schedule.actions):
        down, up = rank, 2 * num_ranks - 1 - rank
        parts = [part for action in row for part in action.parts]
        forwards = [(part.stage, part.micro_batch) for part in parts if part.kind is Kind.FORWARD]
        assert sorted(forwards) == [(stage, m) for stage in (down, up) for m in range(num_micro_batches)]
        # Each stage sees its micro-batches in order, forward and backward: sums of gradients have one order.
        for stage in (down, up):
            for kinds in ([Kind.FORWARD], [Kind.BACKWARD, Kind.BACKWARD_INPUT], [Kind.BACKWARD, Kind.BACKWARD_WEIGHT]):
                order = [part.micro_batch for part in parts if part.stage == stage and part.kind in kinds]
                assert order == list(range(num_micro_batches))
        num_held, held = 0, []
        for part in parts:
            num_held += (part.kind is Kind.FORWARD) - (part.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
            held.append(num_held)
        assert max(held) <= 2 * num_ranks + 1 and held[-1] == 0
        pairs = [action for action in row if isinstance(action, Pair)]
        assert all({pair.forward.stage, pair.backward.stage} == {down, up} for pair in pairs)
        is_last = rank == num_ranks - 1
        assert len(pairs) == 2 * (num_micro_batches - 2 * num_ranks + rank + 1) - is_last + (num_ranks - rank - 1)
        # What is put off comes at the end, when nobody waits for it any more.
        assert [part.kind for part in parts[-(rank + 1) :]] == [Kind.BACKWARD_WEIGHT] * (rank + 1)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_with_nothing_to_do_is_no_fault(busy: int) -> None:
    row = make_schedule("gpipe", num_ranks=1, num_micro_batches=3).actions[0]
    verify(Schedule("idle", 3, (busy,), (row, ()) if busy == 0 else ((), row)))
