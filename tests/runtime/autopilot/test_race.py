"""The race as a game of numbers: whose turn it is, when it is over, and who has won."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from lowtide.runtime.autopilot.race import (
    EVERY_STEPS,
    FINAL_STEPS,
    LATE_STEPS,
    MAX_STEPS,
    Pace,
    Race,
    fastest,
    not_in_force,
    of_slowest_rank,
    result_text,
)


def run(race: Race, seconds_of: Callable[[int, int], float]) -> list[int]:
    """Whose steps they were; `seconds_of(candidate, how many it ran before)`."""
    turns: list[int] = []
    while not race.is_over(has_pending=False):
        lap = race.lap()
        lap.over()
        lap.note(seconds_of(lap.candidate, turns.count(lap.candidate)), 0.0)
        turns.append(lap.candidate)
    return turns


@pytest.mark.parametrize("num", [2, 3, 4])
def test_the_fastest_wins_within_twelve_steps(num: int) -> None:
    for order in itertools.permutations(range(num)):
        race = Race(num)
        # The first step of a plan learns, and takes ten times as long; plans differ by a fiftieth.
        turns = run(race, lambda who, n, order=order: (1 + order[who] / 50) * (10 if who and not n else 1))
        assert fastest(race.medians) == order.index(0)
        assert len(turns) == MAX_STEPS
        counts = [turns.count(who) for who in range(num)]
        assert max(counts) - min(counts) <= 1


def test_turns_are_interleaved_and_the_same_each_time() -> None:
    turns = [run(Race(3), lambda who, n: 1.0 + who / 100) for _ in range(2)]
    assert turns[0] == turns[1] == [0, 1, 2] * 4


def test_a_clear_difference_ends_it_early() -> None:
    race = Race(2)
    assert run(race, lambda who, n: 1.0 + who) == [0, 1, 0, 1, 0, 1]
    assert race.medians == [1.0, 2.0]


def heap_pays(race: Race) -> int:
    """Who wins where a step pays for what the one before it gave back; plan 1 is the faster one by itself."""
    by_itself, gives_back, keeps = [1.08, 1.0], [0.2, 0.0], [0.0, 0.15]
    ran: list[int] = [0]
    while not race.is_over(has_pending=False):
        lap = race.lap()
        who, before = lap.candidate, ran[-1]
        lap.over()
        # Plan 0 trims, and plan 1 finds its memory gone; plan 1 does not, and plan 0 finds more than it would have.
        lap.note(by_itself[who] + (gives_back[before] - keeps[before] if before != who else 0.0), 0.0)
        ran.append(who)
    assert len(ran) - 1 <= race.max_steps
    return fastest(race.medians)


def test_a_turn_of_two_steps_measures_what_a_plan_costs_by_itself() -> None:
    assert heap_pays(Race(2)) == 0  # the wrong one: each pays for the other
    assert heap_pays(Race(2, turn_steps=2)) == 1


@pytest.mark.parametrize(("num", "most"), [(2, 12), (3, 12), (4, 16)])
def test_in_turns_of_two_steps_the_first_is_not_counted(num: int, most: int) -> None:
    race = Race(num, turn_steps=2)
    last = [-1]

    def seconds_of(who: int, n: int) -> float:
        is_first = who != last[0]
        last[0] = who
        return 9.0 if is_first else 1.0 + who / 100

    turns = run(race, seconds_of)
    assert race.max_steps == most == len(turns)
    assert turns[: 2 * num] == [who for who in range(num) for _ in range(2)]
    assert race.medians == [1.0 + who / 100 for who in range(num)]
    assert [turns.count(who) for who in range(num)] == [most // num] * num


def test_in_turns_of_two_steps_a_clear_difference_ends_it_early() -> None:
    assert run(Race(2, turn_steps=2), lambda who, n: 1.0 + who) == [0, 0, 1, 1] * 2


def test_a_candidate_that_is_dropped_in_its_turn_gives_the_next_a_whole_one() -> None:
    race = Race(3, turn_steps=2)
    for _ in range(3):
        race.lap().over()
    assert race.turn == 1 and race.lap().is_counted
    race.drop(1)
    assert race.turn == 0 and not race.lap().is_counted
    assert run(race, lambda who, n: 1.0 + who / 100)[:4] == [0, 0, 2, 2]
    fixed = Race(3, turn_steps=2, is_fixed=True)
    for _ in range(3):
        fixed.lap().over()
    fixed.drop(1)
    assert run(fixed, lambda who, n: 1.0) == [0, 2, 2, 0, 0, 0, 0, 2, 2]


@pytest.mark.parametrize("turn_steps", [1, 2])
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("winner", [0, 1, 2])
def test_one_more_plan_races_the_winner_alone(winner: int, is_fixed: bool, turn_steps: int) -> None:
    race = Race(3, is_fixed=is_fixed, turn_steps=turn_steps)
    times = [1.04, 1.04, 1.04, 1.0]
    times[winner] = 1.02
    run(race, lambda who, n: times[who])
    assert fastest(race.medians) == winner
    num_before = race.num_steps
    race.begin_finals(winner)
    assert race.turn == 3 and not race.lap().is_counted
    turns = run(race, lambda who, n: times[who])
    pattern = [3] * turn_steps + [winner] * turn_steps
    assert turns == (pattern * FINAL_STEPS)[:FINAL_STEPS]
    assert race.num_steps == num_before + FINAL_STEPS
    assert fastest(race.medians) == 3
    assert race.is_over(has_pending=False)


def test_finals_end_early_and_without_a_finalist() -> None:
    race = Race(2)
    run(race, lambda who, n: (1.0, 2.0)[who])
    race.begin_finals(0)
    assert run(race, lambda who, n: (1.0, 2.0, 0.5)[who]) == [2, 0, 2, 0, 2]
    assert fastest(race.medians) == 2
    race = Race(2)
    run(race, lambda who, n: (2.0, 1.0)[who])
    race.begin_finals(1)
    race.drop(2)
    assert race.turn == 0 and race.is_over(has_pending=False)
    assert fastest(race.medians) == 1


def test_who_is_clearly_slower_has_no_more_turns() -> None:
    turns = run(Race(3), lambda who, n: (1.0, 1.02, 3.0)[who])
    assert turns == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0]


def test_one_outlier_of_each_decides_nothing() -> None:
    """An evaluation between two steps, or a checkpoint."""
    for seed in range(50):
        draw = random.Random(seed)
        num = draw.choice([2, 3])
        times = draw.sample([1.0, 1.2, 1.5], num)
        slow = [draw.randrange(1, 4) for _ in range(num)]
        race = Race(num)
        turns = run(race, lambda who, n, times=times, slow=slow: times[who] * (20 if n == slow[who] else 1))
        assert fastest(race.medians) == times.index(min(times)), seed
        assert len(turns) <= MAX_STEPS


def test_a_candidate_that_is_out_has_no_turn_and_no_time() -> None:
    race = Race(3)
    race.lap().over()
    assert race.turn == 1
    lap = race.lap()
    race.drop(1)
    assert race.turn == 0
    lap.note(0.1, 0.0)
    turns = run(race, lambda who, n: 1.0 + who / 100)
    assert 1 not in turns and race.medians[1] is None
    assert fastest(race.medians) == 0
    race = Race(2)
    race.lap().over()
    race.drop(1)
    assert race.is_over(has_pending=True)


def test_ranks_take_the_same_turns_whatever_they_measure() -> None:
    one, other = Race(3, is_fixed=True), Race(3, is_fixed=True)
    assert run(one, lambda who, n: 1.0 + who) == run(other, lambda who, n: 3.0 - who) == [0, 1, 2] * 4


def test_ranks_that_lost_a_candidate_keep_step() -> None:
    race = Race(3, is_fixed=True)
    for _ in range(4):
        race.lap().over()
    assert race.turn == 1
    race.drop(1)
    assert race.turn == 0
    turns = run(race, lambda who, n: 1.0 + who)
    assert turns == [0, 2, 0, 0, 2, 0, 0, 2]
    assert race.num_steps == MAX_STEPS and race.medians[1] is None


def test_times_that_come_late_are_waited_for() -> None:
    race = Race(2, num_late=LATE_STEPS)
    laps = []
    while not race.is_over(has_pending=bool(laps)):
        laps.append(race.lap())
        laps[-1].over()
        if len(laps) > 2:
            lap = laps.pop(0)
            lap.note(1.0 + lap.candidate / 100, 0.0)
    assert race.num_steps == MAX_STEPS + LATE_STEPS
    known = Race(2, num_late=LATE_STEPS)
    assert len(run(known, lambda who, n: 1.0 + who / 100)) == MAX_STEPS


def test_the_slowest_rank_decides() -> None:
    assert of_slowest_rank([[1.0, 2.0, None, 1.0], [3.0, 1.0, 1.0, 2.0]]) == [3.0, 2.0, None, 2.0]
    assert fastest([3.0, 2.0, None, 2.0]) == 1
    assert fastest([None, None]) == 0


def test_it_says_who_won_and_by_how_much() -> None:
    names = ["solver's", "no swap", "fewest layers", "before the correction"]
    assert result_text(names, [0.118, 0.102, None, 0.11]) == (
        "no swap 102.0 ms, before the correction 110.0 ms, solver's 118.0 ms, fewest layers not timed"
    )


def test_equal_plans_do_not_race() -> None:
    assert not_in_force({"a": "1", "b": "2", "c": "2", "d": "3"}, "1") == ["b", "d"]


@pytest.mark.parametrize(("factor", "drifts"), [(1.0, False), (1.1, False), (1.2, True), (0.8, True)])
def test_a_pace_that_drifts(factor: float, drifts: bool) -> None:
    pace = Pace(2.0)
    for number in range(EVERY_STEPS):
        assert not pace.is_due()
        pace.over()
        pace.note(2.0 if number < EVERY_STEPS - 20 else 2.0 * factor, 0.0)
    assert pace.is_due()
    assert pace.ask() == drifts
    assert not pace.is_due()


def test_a_pace_of_few_times_says_nothing() -> None:
    pace = Pace(2.0)
    for _ in range(EVERY_STEPS):
        pace.over()
    pace.note(100.0, 0.0)
    assert pace.is_due() and not pace.ask()
