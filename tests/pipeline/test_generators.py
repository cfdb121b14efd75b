"""The schedules are torch's, action by action, and what torch does not have is as its authors describe it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from lowtide.config.run import SCHEDULES, ClusterSchedule, RunSchedule
from lowtide.errors import ConfigError
from lowtide.pipeline.generators import GENERATORS, make_schedule
from lowtide.pipeline.schedule import Kind, Pair, Schedule, from_csv, to_csv
from lowtide.pipeline.verify import verify
from tests.pipeline.torch_oracle import rows_of
from tests.support.row_counts import peak_live_chunks

GOLDEN = Path(__file__).parent / "golden"
OF_SEVERAL_RANKS = ("gpipe", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev")


def words(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.actions]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_v", "dualpipev"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_actions_are_those_of_torch(name: str, num_ranks: int) -> None:
    for num_micro_batches in {2 * num_ranks, 2 * num_ranks + 1, 3 * num_ranks, 8 * num_ranks}:
        if name == "interleaved" and num_micro_batches % num_ranks:
            continue
        theirs = [list(map(str, row)) for row in rows_of(name, num_ranks, num_micro_batches).values()]
        if name == "1f1b":  # torch's list of the last rank begins with micro-batch 1; what it runs begins with 0
            stage = num_ranks - 1
            theirs[-1] = [
                f"{stage}F{int(word.partition('F')[2]) - 1}" if word.startswith(f"{stage}F") else word
                for word in theirs[-1]
            ]
        ours = make_schedule(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches)
        assert words(ours) == theirs, num_micro_batches


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 6])
def test_zb_v_with_few_micro_batches_is_that_of_torch(num_micro_batches: int) -> None:
    ours = make_schedule("zb_v", num_ranks=4, num_micro_batches=num_micro_batches)
    assert words(ours) == [list(map(str, row)) for row in rows_of("zb_v", 4, num_micro_batches).values()]


@pytest.mark.parametrize(("num_micro_batches", "stages_per_rank"), [(3, 2), (4, 3), (10, 2), (12, 4)])
def test_interleaved_with_rounds_of_any_length_is_that_of_torch(num_micro_batches: int, stages_per_rank: int) -> None:
    ours = make_schedule(
        "interleaved", num_ranks=4, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank
    )
    theirs = rows_of("interleaved", 4, num_micro_batches, stages_per_rank)
    assert words(ours) == [list(map(str, row)) for row in theirs.values()]


def test_phases_of_dualpipev_have_their_counts() -> None:
    """By the kinds of actions alone: of the 8 phases those that only one of them has."""
    num_ranks, num_micro_batches = 4, 11
    schedule = make_schedule("dualpipev", num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    for rank, row in enumerate(schedule.actions):
        kinds = [action.parts[0].kind for action in row if not isinstance(action, Pair)]
        turn = rank == num_ranks - 1
        main, fifth = 2 * (num_micro_batches - 2 * num_ranks + rank + 1) - turn, num_ranks - rank - 1
        assert sum(isinstance(action, Pair) for action in row) == main + fifth
        assert Counter(kinds) == {
            kind: number
            for kind, number in {
                Kind.FORWARD: 3 * (num_ranks - rank - 1) + 2 * (rank + 1) + turn,
                Kind.BACKWARD: num_ranks - rank - 1 + rank + 1 + turn,
                Kind.BACKWARD_INPUT: 2 * (num_ranks - rank - 1) + rank + 1,
                Kind.BACKWARD_WEIGHT: 2 * (num_ranks - rank - 1) + rank + 1,
            }.items()
            if number
        }


def test_one_stage_overlap_pairs_each_forward_with_the_backward_before() -> None:
    schedule = make_schedule("one_stage_overlap", num_ranks=1, num_micro_batches=3)
    assert words(schedule) == [["0F0", "(0F1;0B0)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B", "0B2"]]
    assert peak_live_chunks(schedule) == (2,)


def test_interleaved_overlap_is_interleaved_with_one_more_forward_first() -> None:
    """Every forward and backward that meet are paired, and the order within each of the two is the same."""
    for num_micro_batches in (4, 8, 12):
        plain = make_schedule("interleaved", num_ranks=4, num_micro_batches=num_micro_batches, stages_per_rank=3)
        paired = make_schedule(
            "interleaved_overlap", num_ranks=4, num_micro_batches=num_micro_batches, stages_per_rank=3
        )
        for mine, theirs in zip(paired.actions, plain.actions):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                assert [a for every in mine for a in every.parts if a.kind is kind] == [
                    a for every in theirs for a in every.parts if a.kind is kind
                ]
            lonely = [every.parts[0].kind for every in mine if not isinstance(every, Pair)]
            half = len(lonely) // 2
            assert lonely == [Kind.FORWARD] * half + [Kind.BACKWARD] * half
        extra = [mine - theirs for mine, theirs in zip(peak_live_chunks(paired), peak_live_chunks(plain))]
        assert extra == [1 if peak < 3 * num_micro_batches else 0 for peak in peak_live_chunks(plain)]


@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_can_be_carried_out(name: str) -> None:
    for num_ranks in (1, 2, 3, 5) if name != "one_stage_overlap" else (1,):
        for factor in (2, 3, 7):
            verify(make_schedule(name, num_ranks=num_ranks, num_micro_batches=factor * num_ranks))


@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_small_schedules_are_the_golden_ones(name: str, num_ranks: int) -> None:
    schedule = make_schedule(name, num_ranks=num_ranks, num_micro_batches=2 * num_ranks)
    path = GOLDEN / f"{name}-{num_ranks}-{2 * num_ranks}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    assert to_csv(schedule) == text
    assert from_csv(text, source=str(path), name=name) == schedule


@pytest.mark.parametrize(
    ("name", "numbers", "text"),
    [
        ("dualpipe", {}, "pipeline: unknown schedule 'dualpipe'; did you mean 'dualpipev'?"),
        (
            "x",
            {},
            "pipeline: unknown schedule 'x'; known are 'gpipe', '1f1b', 'interleaved', 'interleaved_overlap', 'zb_v', "
            "'dualpipev', 'one_stage_overlap'",
        ),
        (
            "dualpipev",
            {"num_micro_batches": 7},
            "pipeline: 'dualpipev' on 4 ranks needs at least 8 micro-batches (2 x ranks), not 7",
        ),
        (
            "interleaved",
            {"num_micro_batches": 9},
            "pipeline: 9 micro-batches on 4 ranks do not split into 2 equal rounds of 'interleaved'; use 8 or 10 "
            "micro-batches",
        ),
        ("gpipe", {"num_micro_batches": 0}, "pipeline: the number of micro-batches must be at least 1, not 0"),
        ("gpipe", {"num_ranks": -1}, "pipeline: the number of ranks must be at least 1, not -1"),
        ("interleaved", {"stages_per_rank": 0}, "pipeline: the number of stages of a rank must be at least 1, not 0"),
        (
            "zb_v",
            {"stages_per_rank": 3},
            "pipeline: 'zb_v' has stages_per_rank 2, not 3; 'interleaved' takes any number",
        ),
        (
            "one_stage_overlap",
            {},
            "pipeline: 'one_stage_overlap' is for 1 rank, not 4; use 'dualpipev' for more",
        ),
    ],
)
def test_mistakes_are_named(name: str, numbers: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(name, **{"num_ranks": 4, "num_micro_batches": 8, **numbers})
    assert str(caught.value) == text


@pytest.mark.parametrize("name", GENERATORS)
def test_a_schedule_that_nobody_can_hold_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="forward passes in one schedule, of at most 262144; take fewer of one of"):
        make_schedule(name, num_ranks=512, num_micro_batches=65_536)


def test_one_table_knows_every_schedule() -> None:
    assert set(get_args(RunSchedule)) == set(GENERATORS)
    assert set(get_args(ClusterSchedule)) - {"auto"} == {name for name, kind in SCHEDULES.items() if kind.is_searched}
    for name, kind in SCHEDULES.items():
        assert (name in GENERATORS) == (kind.played_as is None)
        if name in GENERATORS:
            num_ranks = 1 if kind.is_for_one_rank else 4
            schedule = make_schedule(name, num_ranks=num_ranks, num_micro_batches=8)
            pairs = [each for row in schedule.actions for each in row if isinstance(each, Pair)]
            assert bool(pairs) == kind.has_pairs
            assert schedule.num_stages == num_ranks * (kind.stages_per_rank or 2)
