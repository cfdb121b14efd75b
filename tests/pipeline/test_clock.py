"""Bubbles are the published ones where their conditions hold, and are not where they do not.

Durations are whole numbers, so that equality is exact. F, B, I and W are the times of one stage, F&B that of a
pair, P is the number of ranks, M that of micro-batches, r the rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lowtide.pipeline.clock import Played, play, with_transfers
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import AnyAction, Pair, Schedule
from tests.support.row_counts import bubble_of, paired_share, peak_live_chunks

SIZES = [(ranks, factor * ranks) for ranks in (2, 4, 8) for factor in (2, 4, 8)] + [(16, 32), (16, 128)]


def some(choices: tuple, num_ranks: int) -> tuple:
    """All of them; for many ranks the first, since each takes a tenth of a second."""
    return choices[: 1 if num_ranks == 16 else None]


def gaps(played: Played) -> tuple[float, ...]:
    """What each rank waits between its own first and last action."""
    return tuple(row[-1].end - row[0].start - busy for row, busy in zip(played.rows, played.busy_seconds))


def durations(forward: int, backward_input: int, backward_weight: int, pair: int = 0) -> Callable[[AnyAction], float]:
    backward = backward_input + backward_weight
    seconds = {"F": forward, "B": backward, "I": backward_input, "W": backward_weight}
    return lambda each: (pair or forward + backward) if isinstance(each, Pair) else seconds[each.kind]


def made(name: str, num_ranks: int, num_micro_batches: int, **more: int) -> Schedule:
    return make_schedule(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, **more)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, num_ranks: int, num_micro_batches: int) -> None:
    """(P - 1)(F + B), for any F and B. 1F1B holds P - r chunks, GPipe all."""
    schedule = made(name, num_ranks, num_micro_batches)
    for forward, backward in some(((3, 4), (1, 2), (7, 2)), num_ranks):
        bubble = (num_ranks - 1) * (forward + backward)
        played = play(schedule, durations(forward, backward - 1, 1))
        assert set(bubble_of(played)) == {bubble}
        assert played.step_seconds == num_micro_batches * (forward + backward) + bubble
    held = {"gpipe": [num_micro_batches] * num_ranks, "1f1b": list(range(num_ranks, 0, -1))}[name]
    assert list(peak_live_chunks(schedule)) == held


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_bubble_of_interleaved(num_ranks: int, num_micro_batches: int) -> None:
    """(P - 1)(F + B) of one stage, however many there are on a rank: v times less than 1F1B with the same model."""
    for stages in some((2, 3), num_ranks):
        schedule = made("interleaved", num_ranks, num_micro_batches, stages_per_rank=stages)
        played = play(schedule, durations(3, 2, 2))
        assert set(bubble_of(played)) == {(num_ranks - 1) * 7}
        held = [(stages - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1 for rank in range(num_ranks)]
        assert list(peak_live_chunks(schedule)) == held


def test_interleaved_waits_longer_with_fewer_micro_batches_than_ranks() -> None:
    bubbles = [set(bubble_of(play(made("interleaved", 4, number)))) for number in (2, 3, 4, 5, 7, 10)]
    assert bubbles == [{15}, {12}, {9}, {9}, {9}, {9}]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_interleaved_overlap_has_the_bubble_of_interleaved_on_the_last_rank(
    num_ranks: int, num_micro_batches: int
) -> None:
    """And a step that is shorter by what its pairs save."""
    schedule = made("interleaved_overlap", num_ranks, num_micro_batches)
    for pair in some((5, 6, 7), num_ranks):
        played = play(schedule, durations(3, 2, 2, pair))
        assert bubble_of(played)[-1] == (num_ranks - 1) * 7
        num_pairs = 2 * num_micro_batches - num_ranks - 1
        assert played.step_seconds == (2 * num_micro_batches + num_ranks - 1) * 7 - num_pairs * (7 - pair)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [*SIZES, (4, 7), (8, 15)])
def test_zb_v_has_no_bubble_when_all_parts_are_equal(num_ranks: int, num_micro_batches: int) -> None:
    """With F = I = W and at least 2P - 1 micro-batches no rank waits once it has begun; it holds 2P chunks."""
    schedule = made("zb_v", num_ranks, num_micro_batches)
    played = play(schedule, durations(5, 5, 5))
    assert set(gaps(played)) == {0}
    assert set(bubble_of(played)) == {(num_ranks - 1) * 5}
    assert set(peak_live_chunks(schedule)) == {2 * num_ranks}


@pytest.mark.parametrize("parts", [(4, 5, 5), (6, 5, 5), (5, 4, 5), (5, 6, 5), (5, 5, 4), (5, 5, 6)])
def test_zb_v_waits_as_soon_as_one_part_differs(parts: tuple[int, int, int]) -> None:
    for num_ranks in (4, 8):
        assert max(gaps(play(made("zb_v", num_ranks, 4 * num_ranks), durations(*parts)))) > 0


def test_zb_v_waits_with_fewer_micro_batches() -> None:
    for num_ranks in (2, 4, 8):
        assert max(gaps(play(made("zb_v", num_ranks, 2 * num_ranks - 2)))) > 0


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_bubble_and_peak_of_dualpipev(num_ranks: int, num_micro_batches: int) -> None:
    """(P - 1)(F&B + B - 3W) on the last rank, and 2P + 1 chunks on every rank; published with PP = 2P stages.

    For F = I >= W and F&B >= B. Other ranks have fewer pairs, so a pair that saves time leaves them busy for longer and
    waiting for less.
    """
    schedule = made("dualpipev", num_ranks, num_micro_batches)
    assert set(peak_live_chunks(schedule)) == {2 * num_ranks + 1}
    for weight in some((6, 5, 3), num_ranks):
        for pair in some((6 + weight, 2 * 6 + weight - 3, 2 * 6 + weight, 20), num_ranks):
            played = play(schedule, durations(6, 6, weight, pair))
            assert bubble_of(played)[-1] == (num_ranks - 1) * (pair + (6 + weight) - 3 * weight)
    if num_ranks < 16:
        without_gain = bubble_of(play(schedule, durations(6, 6, 6)))
        assert set(without_gain) == {(num_ranks - 1) * 12}


@pytest.mark.parametrize(
    ("parts", "pair", "longer"),
    [
        ((6, 6, 6), 11, True),  # a pair faster than a full backward
        ((6, 6, 7), 19, True),  # W > F
        ((7, 6, 6), 19, True),  # F > I
        ((5, 6, 6), 17, False),  # F < I
    ],
)
def test_dualpipev_differs_where_a_condition_fails(parts: tuple[int, int, int], pair: int, longer: bool) -> None:
    _, backward_input, weight = parts
    for num_ranks in (2, 4, 8):
        played = play(made("dualpipev", num_ranks, 4 * num_ranks), durations(*parts, pair))
        published = (num_ranks - 1) * (pair + backward_input + weight - 3 * weight)
        assert (bubble_of(played)[-1] > published) == longer
        assert bubble_of(played)[-1] != published


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_share_of_dualpipev_that_runs_in_pairs(num_ranks: int, num_micro_batches: int) -> None:
    """The ceiling of its overlap: (2M - 3P + r + 1 - [r = P - 1]) / 2M on rank r."""
    assert paired_share(made("dualpipev", num_ranks, num_micro_batches)) == tuple(
        (2 * num_micro_batches - 3 * num_ranks + rank + 1 - (rank == num_ranks - 1)) / (2 * num_micro_batches)
        for rank in range(num_ranks)
    )


def test_dualpipev_pays_only_where_pairs_gain() -> None:
    """Against ZB-V with the same model on the same 4 ranks: from F&B = 0.96 (F + B) on it is faster."""
    zb_v = play(made("zb_v", 4, 16), durations(100, 100, 100)).step_seconds
    schedule = made("dualpipev", 4, 16)
    assert play(schedule, durations(100, 100, 100, 300)).step_seconds > zb_v
    assert play(schedule, durations(100, 100, 100, 288)).step_seconds < zb_v


@pytest.mark.parametrize(
    ("name", "stages", "step", "percent"), [("1f1b", 2, 114, 10), ("zb_v", 1, 99, 5), ("dualpipev", 1, 102, 12)]
)
def test_what_a_transfer_costs(name: str, stages: int, step: int, percent: int) -> None:
    """The same model on 4 ranks with 16 micro-batches, as an independent simulation had it: the step where a transfer
    takes no time, and by how much longer it is where one takes 0.4 of a forward."""
    schedule = made(name, 4, 16)
    seconds_of = durations(10 * stages, 10 * stages, 10 * stages)
    without = play(schedule, seconds_of).step_seconds
    assert without == 10 * step
    assert round(100 * (play(schedule, seconds_of, transfer_seconds=4).step_seconds / without - 1)) == percent


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev"])
def test_every_action_starts_as_soon_as_it_can(name: str) -> None:
    """By the rules alone: one at a time, in order, when what it reads is there."""
    rng = random.Random(name)
    schedule = made(name, 3, 6)
    seconds = {action: rng.randrange(1, 9) for row in schedule.actions for action in row}
    for transfer in (0, 2):
        played = play(schedule, seconds.__getitem__, transfer_seconds=transfer)
        assert tuple(tuple(timed.action for timed in row) for row in played.rows) == schedule.actions
        done = {
            part.makes: (timed.end, rank)
            for rank, row in enumerate(played.rows)
            for timed in row
            for part in timed.action.parts
        }
        for rank, row in enumerate(played.rows):
            free = 0
            for timed in row:
                reads = [done[need] for part in timed.action.parts for need in schedule.needs(part)]
                arrivals = [when + (transfer if home != rank else 0) for when, home in reads]
                assert timed.start == max([free, *arrivals])
                assert timed.end == timed.start + seconds[timed.action]
                free = timed.end
        # written-out transfers change no time
        assert play(with_transfers(schedule), seconds.__getitem__, transfer_seconds=transfer) == played


def test_the_turn_of_a_v_costs_no_transfer() -> None:
    """One micro-batch goes down and up 2 ranks: 3 hops between ranks would be 6 ways, without the turn 4."""
    schedule = made("zb_v", 2, 1)
    assert play(schedule, transfer_seconds=10).step_seconds - play(schedule).step_seconds == 4 * 10


def test_durations_of_diagrams() -> None:
    played = play(made("dualpipev", 2, 4))
    by_kind = {str(timed.action): timed.end - timed.start for row in played.rows for timed in row}
    assert [by_kind[word] for word in ("0F0", "3B2", "3I0", "3W0", "(0F3;3B1)OVERLAP_F_B")] == [1, 2, 1, 1, 3]


def test_rows_without_transfers() -> None:
    schedule = made("dualpipev", 2, 4)
    assert tuple(tuple(action for action, *_ in row) for row in with_transfers(schedule).computed) == schedule.actions
