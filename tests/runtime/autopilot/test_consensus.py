"""Ranks that meet at a store: everyone who comes gets the same answer, whenever it is that the others come."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from lowtide.core.plan import Plan
from lowtide.errors import BudgetError
from lowtide.runtime.session.consensus import PlanConsensus, after, agreed, meet
from lowtide.tensors.ranks import ALONE, any_rank, gather
from tests.support import two_ranks

PLACE = "here"


class LateStore:
    """A store at which another rank comes just after the `num_looks`-th look for a decision found none."""

    def __init__(self, num_looks: int) -> None:
        self.inner = dist.HashStore()
        self.num_looks = num_looks
        self.others: list[bool] = []

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self.inner.compare_set(key, expected, wanted)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def check(self, keys: list[str]) -> bool:
        found = self.inner.check(keys)
        self.num_looks -= 1
        if self.num_looks == 0:
            assert not found
            self.others.append(meet(self.inner, PLACE, 2, after(0.0)))
        return found


def test_who_comes_while_another_loses_patience_is_still_met() -> None:
    store = LateStore(1)
    assert meet(store, PLACE, 2, after(-1.0)) is True  # type: ignore[arg-type]
    assert store.others == [True]


def test_who_comes_too_late_learns_that_nobody_waited() -> None:
    store = dist.HashStore()
    assert meet(store, PLACE, 2, after(0.01)) is False
    assert meet(store, PLACE, 2, after(10.0)) is False


@pytest.mark.parametrize("patience_seconds", [0.0, 0.002, 600.0])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_get_the_same_answer(num_ranks: int, patience_seconds: float) -> None:
    for _ in range(20):
        store, answers = dist.HashStore(), []

        def come(store: Any = store, answers: list[bool] = answers) -> None:
            answers.append(meet(store, PLACE, num_ranks, after(patience_seconds)))

        threads = [threading.Thread(target=come) for _ in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(answers)) == 1 and len(answers) == num_ranks
        assert answers[0] or patience_seconds < 600.0


def test_alone_everything_is_as_one_says() -> None:
    consensus = PlanConsensus(ALONE, 7)
    assert consensus.budget_bytes == 7
    assert consensus.all_here("review")
    assert gather("x", ALONE) == ["x"]
    assert (any_rank(True, ALONE), any_rank(False, ALONE)) == (True, False)
    consensus.part()
    assert consensus.all_here("shape")
    with pytest.raises(AssertionError):
        agreed(None, None, ALONE)


# -- two real ranks --------------------------------------------------------------------------------------------------


def parley(rank: int) -> dict[str, Any]:
    """What one of two ranks is told about everything that they decide together."""
    consensus = PlanConsensus(None, [7, 5][rank], patience_seconds=600.0)
    own = Plan(layers=("mine",), min_bytes=rank)
    found = {
        "budget": consensus.budget_bytes,
        "gathered": gather(rank, None),
        "any": [any_rank(rank == who, None) for who in range(3)],
        "plan": agreed(own, None, None).min_bytes,
        "is_together": [consensus.all_here("one thing")],
    }
    for floors in ((3, 9), (9, 3), (None, 4)):
        mine = floors[rank]
        error = None if mine is None else BudgetError(f"rank {rank}", floor_bytes=mine, suggestions=())
        try:
            agreed(own if mine is None else None, error, None)
        except BudgetError as common:
            found.setdefault("errors", []).append((str(common), common.floor_bytes))
    consensus.part()
    # Only one asks: if it waited for the other one, it would do so for longer than the test does.
    found["is_together"] += [consensus.all_here("another")] if rank == 0 else [consensus.is_together]
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    return two_ranks.run(__name__, [("parley", {})], tmp_path_factory.mktemp("ranks"))[0]


def test_the_smallest_budget_is_that_of_all(said: tuple[dict, dict]) -> None:
    assert [each["budget"] for each in said] == [5, 5]


def test_one_rank_is_enough(said: tuple[dict, dict]) -> None:
    assert [each["any"] for each in said] == [[True, True, False]] * 2
    assert [each["gathered"] for each in said] == [[0, 1]] * 2


def test_all_take_the_first_ranks_plan_and_the_highest_floor(said: tuple[dict, dict]) -> None:
    assert [each["plan"] for each in said] == [0, 0]
    assert [each["errors"] for each in said] == [[("rank 1", 9), ("rank 0", 9), ("rank 1", 4)]] * 2


def test_a_council_that_has_parted_does_not_meet_again(said: tuple[dict, dict]) -> None:
    assert [each["is_together"] for each in said] == [[True, False]] * 2
