"""What two halves of a pair may hold at once, beside halves that take turns, and rows of experts that other
micro-batches get."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowtide.pipeline.overlap import Overlap
from lowtide.pipeline.turns import (
    Exchange,
    Half,
    growth_of,
    halves_of,
    shares_of,
    slots_of,
    with_kept_rows,
    with_more_rows,
)
from lowtide.profiling.observe_step import observe


class NoWork:
    def wait(self) -> None:
        pass


def in_turns(forward: Half, backward: Half) -> list[tuple[int | None, int | None]]:
    """(operator of forward, operator of backward) that are at work or were the last ones, in a pair that `Overlap`
    carries out; None: it has not begun."""
    overlap = Overlap(start=lambda rows, sent, route: NoWork())
    at: list[int | None] = [None, None]
    seen = []

    def walk(number: int, half: Half) -> None:
        from lowtide.pipeline.exchange import Route, running_half

        for op in range(half.first, half.end):
            if op in half.stops:
                own: Any = running_half.get()
                own.start(Tensor([1.0]), Tensor([1.0]), Route((1,), (1,), None))()
            at[number] = op
            seen.append((at[0], at[1]))

    overlap.run_pair(lambda: walk(0, forward), lambda: walk(1, backward))
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_halves_that_take_turns_are_never_where_no_slot_says_they_are(seed: int) -> None:
    rng = random.Random(seed)
    halves = []
    for _ in range(2):
        num_ops = rng.randint(2, 12)
        halves.append(
            Half(0, num_ops, tuple(sorted(rng.sample(range(1, num_ops), rng.randint(0, min(4, num_ops - 1))))))
        )
    slots = list(slots_of(*halves))
    for forward, backward in in_turns(*halves):
        assert any(
            (forward in of_forward if forward is not None else not of_forward)
            and (backward in of_backward if backward is not None else not of_backward)
            for of_forward, of_backward in slots
        ), (halves, forward, backward)


@pytest.mark.parametrize("seed", range(20))
def test_what_both_may_have_together_is_in_the_room_at_every_moment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    halves, needs = [], []
    for first, end in ((0, 9), (9, 20)):
        stops = np.sort(rng.choice(np.arange(first + 1, end), rng.integers(0, 4), replace=False))
        halves.append(Half(first, end, tuple(int(stop) for stop in stops)))
        least = rng.integers(0, 50, 20)
        needs.append((least, least + rng.integers(0, 100, 20)))
    room = 120
    own = shares_of((halves[0], needs[0]), (halves[1], needs[1]), room)
    assert sum(share[half.first : half.end].min() for share, half in zip(own, halves)) < 2 * room
    for forward, backward in in_turns(*halves):
        there = [0 if op is None else int(share[op]) for share, op in zip(own, (forward, backward))]
        assert sum(there) <= room


def exchange(start: int, sent: int, received: int, *, takes_turn: bool = True, num_ranks: int = 2) -> Exchange:
    return Exchange(
        start=start,
        wait=start + 1,
        num_sent=sent,
        num_received=received,
        nbytes=4 * received,
        num_ranks=num_ranks,
        takes_turn=takes_turn,
    )


def test_rows_that_routing_brings_get_more_room_and_those_that_come_back_do_not() -> None:
    counts, there, back = exchange(1, 4, 4, takes_turn=False), exchange(3, 10, 8), exchange(6, 8, 10)
    gradients = [exchange(12, 10, 8), exchange(15, 8, 10)]
    most = [(4, 4), (10, 12), (12, 10)]
    # 12 rows of another micro-batch for 8 of this one, and a quarter beyond; in backward the gradients of those rows.
    assert growth_of([counts, there, back, *gradients], 10, most) == (1.0, 1.875, 1.0, 1.875, 1.0)
    assert growth_of([exchange(3, 10, 0), exchange(6, 0, 10)], 10, [(10, 5), (5, 10)]) is None
    assert growth_of([exchange(3, 8, 8, num_ranks=1)], 10, [(8, 8)]) == (1.0,)


def test_counts_of_rows_are_no_stop() -> None:
    forward, backward = halves_of(20, 10, [exchange(1, 4, 4, takes_turn=False), exchange(3, 9, 9), exchange(15, 9, 9)])
    assert (forward, backward) == (Half(0, 10, (4,)), Half(10, 20, (16,)))


def test_a_layer_that_runs_again_keeps_its_rows_and_another_one_that_exchanges_does_not_run_again() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    profile = observe(model, (torch.ones(4, 8),), needs_scalar=False)
    call, *others = profile.calls
    each = exchange(call.first_op, 3, 5)
    plain = with_kept_rows(profile, [each], ())
    assert plain.op_bytes == profile.op_bytes
    assert [one.why_not for one in plain.calls] == ["it exchanges rows with other ranks", *("" for _ in others)]
    kept = with_kept_rows(profile, [each], {call.name})
    assert kept.calls == profile.calls
    over = max(node.release for node in profile.nodes if node.reads and node.layer == call.name)
    assert over > profile.num_forward_ops
    more = [now - before for now, before in zip(kept.op_bytes, profile.op_bytes, strict=True)]
    assert more == [each.nbytes * (call.first_op <= op < over) for op in range(len(more))]


def test_what_is_made_of_more_rows_has_more_bytes_and_nothing_else_has() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    profile = observe(model, (torch.ones(4, 8),), needs_scalar=False)
    _, second, last = (call.first_op for call in profile.calls)
    there, back = exchange(second, 8, 8), exchange(last, 8, 8)
    grown = with_more_rows(profile, [there, back], (2.0, 1.0))
    assert with_more_rows(profile, [], ()) == with_more_rows(profile, [there, back], (1.0, 1.0)) == profile
    for node, before in zip(grown.nodes, profile.nodes, strict=True):
        if second <= node.born <= last:
            assert node.nbytes == 2 * before.nbytes
        elif node.born < second - 2 or node.born > last + 1:
            assert node.nbytes == before.nbytes
    assert grown.op_bytes[profile.num_forward_ops :] == profile.op_bytes[profile.num_forward_ops :]
