"""Pairs on two real ranks: loss and every gradient are plain autograd's to the bit, and collectives have one order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import two_ranks
from tests.support.exposed import exposed

BITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"change": "autocast"},
    "checkpointed parts": {"change": "checkpoint"},
    "parts": {"memory": {"recompute": ["layers.*.attention", "layers.*.experts"]}},
    "swap and layers": {"memory": {"swap": ["layers.1"], "recompute": ["layers.0"], "min_bytes": 0}, "hides": True},
    "swap and checkpoint": {"memory": {"swap": "all", "min_bytes": 0}, "change": "checkpoint", "seed": 2},
    "recipes, hides": {"memory": "solved", "seed": 4, "hides": True},
}
MORE_BITS: dict[str, dict[str, Any]] = {
    "hides": {"hides": True},
    "layers": {"memory": {"recompute": "all"}},
    "swap": {"memory": {"swap": "all", "min_bytes": 0}},
    "layers under autocast": {"memory": {"recompute": "all"}, "change": "autocast"},
    "swap, late": {"memory": {"swap": "all", "min_bytes": 0}, "seed": 1},
    "recipes": {"memory": "solved", "seed": 3},
}
RAISES = ("forward", "backward")


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[Any, Any]]:
    jobs = [(name, ("bits", arguments)) for name, arguments in BITS.items()]
    jobs += [(name, (name, {})) for name in ("order", "independent", "sharded")]
    jobs += [(f"raises in {where}", ("raises", {"where": where})) for where in RAISES]
    with tempfile.TemporaryDirectory() as folder:
        found = two_ranks.run("tests.pipeline.overlap_jobs", [job for _, job in jobs], Path(folder))
    return {name: answer for (name, _), answer in zip(jobs, found, strict=True)}


@pytest.mark.parametrize("name", BITS)
def test_loss_and_gradients_are_those_of_plain_autograd(answers: dict[str, tuple[Any, Any]], name: str) -> None:
    assert_same_bits(answers[name], BITS[name])


@pytest.mark.extended
@pytest.mark.parametrize("name", MORE_BITS)
def test_so_they_are_in_other_ways(name: str, tmp_path: Path) -> None:
    (answer,) = two_ranks.run("tests.pipeline.overlap_jobs", [("bits", MORE_BITS[name])], tmp_path)
    assert_same_bits(answer, MORE_BITS[name])


def assert_same_bits(answer: tuple[Any, ...], how: dict[str, Any]) -> None:
    for rank in answer:
        assert rank["different"] == [[], [], []]
        assert rank["num"] == [51, 51, 51, 51]
        assert exposed(event for event in rank["log"] if event.pair in (1, 2, 3)) == []
        memory = how.get("memory")
        if isinstance(memory, dict):
            assert rank["stats"] == ("swap" in memory, "recompute" in memory)
        elif memory == "solved":
            assert rank["stats"] == (True, True)


def test_all_ranks_have_one_order_of_collectives(answers: dict[str, tuple[Any, Any]]) -> None:
    first, second = answers["order"]
    assert first == second and len(first) > 200


@pytest.mark.parametrize("where", RAISES)
def test_ranks_that_raise_alike_go_on_together(answers: dict[str, tuple[Any, Any]], where: str) -> None:
    for rank in answers[f"raises in {where}"]:
        assert rank == {"text": "this one", "different": []}


def test_exchanges_go_back_in_the_reverse_order_whatever_ranks_have_between_them(
    answers: dict[str, tuple[Any, Any]],
) -> None:
    assert answers["independent"] == ({"log": ["3", "5", "5", "3"], "has_gradient": True},) * 2


def test_sharded_modules_are_refused_by_name(answers: dict[str, tuple[Any, Any]]) -> None:
    text = (
        "lowtide: 'FSDPAttention' is a module of FSDP2, which takes one forward or backward at a time: in a pair it "
        "would lose gradients. Shard the optimizer's state instead, or step without lowtide.pipeline.Overlap"
    )
    assert answers["sharded"] == (text, text)
