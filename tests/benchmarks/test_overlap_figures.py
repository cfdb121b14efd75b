"""Figures of overlap, against numbers that can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.overlap_figures import (
    ChunkTimes,
    Link,
    hidden_share,
    hidden_share_by_phase,
    pair_ceiling,
    phases_of_dualpipev,
    predict_step,
    replay,
    seconds_of,
    step_seconds,
    traced_share,
)
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.overlap import BACKWARD, FORWARD, Event
from lowtide.pipeline.schedule import Action, Kind, Pair
from tests.support.exposed import exposed
from tests.support.row_counts import paired_share

HALVES = {"F": FORWARD, "B": BACKWARD}


def log_of(words: str, pair: int = 0) -> list[Event]:
    """`B.` a segment, `B0>` an issue, `>B0` a wait, `B#` counts."""
    log: list[Event] = []
    for word in words.split():
        half = HALVES[word.strip(".>#0123456789")]
        if word.endswith("."):
            num = sum(event.half == half and event.kind == "segment" for event in log)
            log.append(Event(pair, half, "segment", num))
        elif word.endswith("#"):
            log.append(Event(pair, half, "counts", 0))
        else:
            kind = "issue" if word.endswith(">") else "wait"
            log.append(Event(pair, half, kind, int(word.strip(">FB"))))
    return log


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("B. B0> F. F0> >B0 B. >F0 F.", []),
        ("B. B0> >B0 F. F0> B. >F0 F.", ["B0"]),
        ("B. B0> B. >B0 F. F0> F. >F0", ["B0", "F0"]),
        ("B. B0> F# >B0 B.", ["B0"]),
        ("B. B0> B1> F. >B1 >B0 B.", []),
        ("B. B0> >B0 F. B1> >B1 B. B2> F. >B2", ["B0", "B1"]),
    ],
)
def test_an_exchange_is_exposed_if_the_other_half_did_nothing_meanwhile(words: str, found: list[str]) -> None:
    assert [f"{event.half[0].upper()}{event.number}" for event in exposed(log_of(words))] == found


def test_other_pairs_hide_nothing() -> None:
    first, second = log_of("B. B0>"), log_of("F.", pair=1)
    assert exposed([*first, *second, *log_of(">B0")]) == [first[1]]


def test_an_exchange_that_nobody_waits_for_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="nobody waited for"):
        exposed(log_of("B. B0> F."))


def test_the_share_of_the_whole_step() -> None:
    assert hidden_share(without_seconds=10, serial_seconds=14, overlapped_seconds=11) == 0.75
    assert hidden_share(without_seconds=10, serial_seconds=14, overlapped_seconds=14) == 0


def test_the_share_of_a_trace_counts_each_moment_once() -> None:
    assert traced_share([(0, 2), (1, 4)], [(1, 2), (1, 3), (6, 9)]) == 0.5


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("per_rank", [2, 4, 8])
def test_the_ceiling_is_what_the_schedule_pairs(num_ranks: int, per_rank: int) -> None:
    num_micro_batches = per_rank * num_ranks
    schedule = make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    assert pair_ceiling(num_ranks, num_micro_batches) == pytest.approx(paired_share(schedule))


def test_a_link_takes_latency_and_bytes() -> None:
    assert Link(latency_seconds=2, bytes_per_second=100).seconds(300) == 5


PAIR = "B. B0> F. F0> >B0 B. B1> >F0 F. F1> >B1 B. >F1 F."


def test_replay_waits_for_what_a_segment_does_not_cover() -> None:
    log = log_of(PAIR)
    short = replay(log, lambda _: 10, lambda _: 8)
    assert (short.step_seconds, short.wait_seconds, short.hidden_share) == (60, 0, 1)
    assert (short.compute_seconds, short.link_seconds, short.serial_seconds) == (60, 32, 92)
    long = replay(log, lambda _: 10, lambda _: 13)
    # Each exchange begins when the one before it is over, so its wait also pays for that one.
    assert (long.step_seconds, long.wait_seconds) == (72, 12)
    uneven = replay(log, lambda event: 10 if event.half == BACKWARD else 4, lambda _: 8)
    assert (uneven.step_seconds, uneven.wait_seconds) == (50, 8)


def test_replay_of_a_half_alone_is_serial() -> None:
    alone = replay(log_of("F. F0> >F0 F. F1> >F1 F."), lambda _: 10, lambda _: 3)
    assert (alone.step_seconds, alone.serial_seconds, alone.hidden_share) == (36, 36, 0)
    hiding = replay(log_of("F. F0> F. >F0 F."), lambda event: (10, 2, 10)[event.number], lambda _: 3)
    assert (hiding.step_seconds, hiding.hidden_share) == (23, pytest.approx(2 / 3))


TIMES = ChunkTimes(
    forward_seconds=(10, 10, 10, 10, 1),
    backward_seconds=(2, 20, 20, 20, 20),
    weight_seconds=(1, 10, 10, 10, 10),
    exchange_seconds=8,
)
"""Two layers: attention, experts, attention, experts; exchanges between them."""


def test_one_stage_is_as_its_parts() -> None:
    schedule = make_schedule("one_stage_overlap", num_ranks=1, num_micro_batches=4)
    step = predict_step(schedule, TIMES)
    assert (step.without_seconds, step.serial_seconds) == (4 * 123, 4 * (123 + 64))
    assert step.overlapped_seconds == 73 + 3 * 123 + 114
    assert step.hidden_share == 0.75
    # Of the last backward, alone: weight gradients of 10 after each exchange of 8, but of 1 after the first.
    assert predict_step(schedule, TIMES, most_kept=0).overlapped_seconds == 73 + 3 * 123 + 114 - 1 - 3 * 8


def test_parts_and_shared_experts_hide_exchanges_of_their_own_micro_batch() -> None:
    """Alone, of each exchange the first half of the way there and the last of the way back: 4 of 8."""
    schedule = make_schedule("one_stage_overlap", num_ranks=1, num_micro_batches=4)
    parts = dataclasses.replace(TIMES, num_parts=2)
    assert step_seconds(schedule, parts, overlaps=True) == (2 * 28 + 1) + 3 * 123 + (2 + 2 * (4 + 20 + 4 + 20))
    # What the host takes for one part it takes for both, in each of two layers, forward and backward.
    both = dataclasses.replace(parts, host_seconds=1)
    assert step_seconds(schedule, both, overlaps=True) - step_seconds(schedule, parts, overlaps=True) == 4 * (2 + 2)
    # Shared experts of 4 (8 in backward) hide the first half; then the link is busy until 26.
    shared = dataclasses.replace(parts, shared_share=0.4)
    assert step_seconds(schedule, shared, overlaps=True) == (2 * 26 + 1) + 3 * 123 + (2 + 2 * (4 + 20 + 20))
    assert step_seconds(schedule, shared, overlaps=False) == 4 * (123 + 64)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("per_rank", [4, 8, 16])
def test_a_whole_step_reaches_the_ceiling_of_its_schedule(num_ranks: int, per_rank: int) -> None:
    schedule = make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=per_rank * num_ranks)
    shares = pair_ceiling(num_ranks, per_rank * num_ranks)
    ceiling = sum(shares) / len(shares)
    step = predict_step(schedule, TIMES)
    # Above it where a wait falls into the bubble, which costs nothing.
    assert ceiling - 0.03 < step.hidden_share < ceiling + 0.04
    assert step.hidden_share > (0.83 if per_rank >= 8 else 0.6)
    # Weight gradients that wait hide a fifth of what is left, and more.
    kept = step_seconds(schedule, TIMES, overlaps=True, most_kept=2)
    assert 1 - dataclasses.replace(step, overlapped_seconds=kept).hidden_share < 0.8 * (1 - step.hidden_share)


def test_times_between_stamps() -> None:
    log = log_of("B. B0> F# F. >B0")
    found = seconds_of(list(zip([3.0, 3.5, 4.0, 6.0, 6.25], log, strict=True)), 1.0)
    assert [(event.kind, seconds) for event, seconds in found] == [
        ("segment", 2.0),
        ("issue", 0.5),
        ("segment", 2.5),
        ("wait", 0.25),
    ]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 2), (1, 5), (2, 4), (2, 9), (4, 8), (4, 20), (8, 16)])
def test_phases_are_the_loops_of_the_schedule(num_ranks: int, num_micro_batches: int) -> None:
    schedule = make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    for rank, row in enumerate(schedule.actions):
        actions = [each for each in row if isinstance(each, Pair) or each.kind is not Kind.BACKWARD_WEIGHT]
        phases = phases_of_dualpipev(num_ranks, num_micro_batches, rank)
        assert len(phases) == len(actions)
        words: dict[int, list[str]] = {}
        for phase, each in zip(phases, actions, strict=True):
            words.setdefault(phase, []).append(each.kind.value if isinstance(each, Action) else "P")
        left, own = num_ranks - rank - 1, rank + 1
        assert words.get(1, []) == ["F"] * 2 * left
        assert words[2] == ["F"] * 2 * own
        assert words.get(3, []) == ["I", "F"] * left
        apart = rank == num_ranks - 1
        assert words[4] == (["F", "B"] if apart else ["P"]) + ["P"] * (len(words[4]) - 1 - apart)
        assert words.get(5, []) == ["B", "P"] * left
        assert set(words[6]) <= {"B", "I"}
        assert words.get(7, []) == ["I"] * left
        assert "P" not in words.get(8, [])


def test_waits_count_in_the_phase_of_their_pair() -> None:
    log = [*log_of("F. F0> >F0 F.", pair=7), *log_of("B. B0> F. F0> >B0 B. >F0 F.", pair=8)]
    took = [(event, {"wait": 0.25, "segment": 1.0, "issue": 0.0}[event.kind]) for event in log]
    assert hidden_share_by_phase((1, 4), took, 0.5) == {1: 0.5, 4: 0.5}
    took = [(event, seconds if event.pair == 7 else 0.0) for event, seconds in took]
    assert hidden_share_by_phase((1, 4), took, 0.5) == {1: 0.5, 4: 1.0}
