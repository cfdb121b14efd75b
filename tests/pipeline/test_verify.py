"""A schedule passes where it can be carried out, is refused where it cannot, and the words say what is missing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.pipeline.clock import with_transfers
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import AnyAction, Schedule, as_v, from_csv, in_rounds
from lowtide.pipeline.verify import order_faults, verify
from tests.pipeline.machine import Machine, Outcome
from tests.pipeline.torch_oracle import lowered, rows_of

GOLDEN = Path(__file__).parent / "golden"
OF_SEVERAL_RANKS = ("gpipe", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev")


def passes(schedule: Schedule, *, sends_wait: bool) -> bool:
    try:
        verify(schedule, sends_wait=sends_wait)
    except ConfigError:
        return False
    return True


def written(*rows: str, name: str = "mine") -> Schedule:
    return from_csv("\n".join(",".join(row.split()) for row in rows), source="text", name=name)


def of_torch(name: str, num_ranks: int, num_micro_batches: int, *, defer: bool) -> Schedule:
    place = in_rounds(num_ranks, 2) if name.startswith("interleaved") else as_v(num_ranks)
    rows = lowered(rows_of(name, num_ranks, num_micro_batches), place, defer=defer)
    text = "\n".join(",".join(map(str, rows[rank])) for rank in range(num_ranks))
    return from_csv(text, source="torch", name=name)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="what torch 2.13 does")
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_micro_batches", "num_faults"),
    [
        ("dualpipev", 4, 8, 5),
        ("dualpipev", 8, 16, 27),
        ("zb_v", 4, 8, 9),
        ("zb_v", 8, 16, 35),
        ("interleaved_zero_bubble", 2, 4, 4),
        ("interleaved", 4, 8, 0),
    ],
)
def test_receives_that_torch_defers_take_each_other_s_messages(
    name: str, num_ranks: int, num_micro_batches: int, num_faults: int
) -> None:
    """Torch 2.13, `defer_pp_recv=True`: runs to the end with wrong gradients. Without it, it runs to the right ones."""
    early = of_torch(name, num_ranks, num_micro_batches, defer=False)
    verify(early)
    late = of_torch(name, num_ranks, num_micro_batches, defer=True)
    assert len(list(order_faults(late))) == num_faults
    assert passes(late, sends_wait=False) == (num_faults == 0)
    outcome = Machine(late, rendezvous=False, seed=0).run()
    assert outcome is (Outcome.WRONG if num_faults else Outcome.RIGHT)


def test_the_words_for_a_swapped_message() -> None:
    """The file is what torch 2.13 made with `defer_pp_recv=True`."""
    with (GOLDEN / "torch-2.13-deferred-dualpipev-4-8.csv").open(newline="", encoding="utf-8") as file:
        schedule = from_csv(file.read(), source="golden", name="dualpipev")
    assert len(list(order_faults(schedule))) == 5
    with pytest.raises(ConfigError) as caught:
        verify(schedule)
    assert str(caught.value) == (
        "schedule 'dualpipev': message 6 from rank 0 to rank 1 is sent as 0SEND_F6 (rank 0, action 14) and received as "
        "6RECV_B0 (rank 1, action 24); with equal shapes the two would be swapped without an error"
    )


@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
def test_our_transfers_are_right_however_sends_wait(name: str) -> None:
    for num_ranks in (2, 3, 4):
        schedule = with_transfers(make_schedule(name, num_ranks=num_ranks, num_micro_batches=2 * num_ranks))
        for sends_wait in (True, False):
            verify(schedule, sends_wait=sends_wait)
            assert Machine(schedule, rendezvous=sends_wait, seed=num_ranks).run() is Outcome.RIGHT


def swapped(row: tuple[AnyAction, ...], rng: random.Random) -> tuple[AnyAction, ...]:
    first, second = rng.sample(range(len(row)), 2)
    changed = list(row)
    changed[first], changed[second] = changed[second], changed[first]
    return tuple(changed)


def neighbours_swapped(row: tuple[AnyAction, ...], rng: random.Random) -> tuple[AnyAction, ...]:
    index = rng.randrange(len(row) - 1)
    return (*row[:index], row[index + 1], row[index], *row[index + 2 :])


def dropped(row: tuple[AnyAction, ...], rng: random.Random) -> tuple[AnyAction, ...]:
    index = rng.randrange(len(row))
    return row[:index] + row[index + 1 :]


def moved(row: tuple[AnyAction, ...], rng: random.Random) -> tuple[AnyAction, ...]:
    changed = list(row)
    changed.insert(rng.randrange(len(row)), changed.pop(rng.randrange(len(row))))
    return tuple(changed)


@pytest.mark.parametrize("sends_wait", [True, False])
@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
def test_damage_is_found_exactly_where_it_does_harm(name: str, sends_wait: bool) -> None:
    """By a machine that matches messages by their order alone. Nothing harmless is refused either."""
    rng = random.Random(f"{name} {'waits' if sends_wait else 'buffers'}")
    harmless = 0
    whole = {
        number: with_transfers(make_schedule(name, num_ranks=number, num_micro_batches=2 * number)) for number in (2, 3)
    }
    for number in range(80):
        num_ranks = rng.choice((2, 3))
        schedule = whole[num_ranks]
        rows = list(schedule.actions)
        rank = rng.randrange(num_ranks)
        damage = (swapped, neighbours_swapped, dropped, moved)[number % 4]
        rows[rank] = damage(rows[rank], rng)
        damaged = replace(schedule, actions=tuple(rows))
        outcome = Machine(damaged, rendezvous=sends_wait, seed=number).run()
        assert passes(damaged, sends_wait=sends_wait) == (outcome is Outcome.RIGHT), (
            number,
            damage.__name__,
            rank,
            outcome,
        )
        harmless += outcome is Outcome.RIGHT
    assert 5 < harmless < 60


@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
def test_damage_without_transfers_is_found_or_harmless(name: str) -> None:
    """What passes gets its transfers, and is then right."""
    rng = random.Random(name)
    harmless = 0
    schedule = make_schedule(name, num_ranks=3, num_micro_batches=6)
    for number in range(60):
        rows = list(schedule.actions)
        rank = rng.randrange(3)
        rows[rank] = (swapped, neighbours_swapped, dropped, moved)[number % 4](rows[rank], rng)
        damaged = replace(schedule, actions=tuple(rows))
        if passes(damaged, sends_wait=True):
            harmless += 1
            whole = with_transfers(damaged)
            verify(whole)
            assert Machine(whole, rendezvous=True, seed=number).run() is Outcome.RIGHT
    assert harmless > 3


CLASSIC = ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            CLASSIC,
            "schedule 'mine' stands still for ever when a send waits until its receiver has come to it: rank 0 at "
            "action 3 (0SEND_F1) waits for 1RECV_F1 of rank 1; rank 1 at action 3 (1SEND_B0) waits for "
            "0RECV_B0 of rank 0",
        ),
        (("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"), None),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "schedule 'mine' stands still for ever: rank 0 at action 1 (0B0) waits for 1B0 of rank 1; rank 1 at "
            "action 1 (1F1) waits for 0F1 of rank 0",
        ),
        (("0F0",), "schedule 'mine', rank 0: 0B0 is missing (stage 0, micro-batch 0)"),
        (("0F0 0I0",), "schedule 'mine', rank 0: 0W0 is missing (stage 0, micro-batch 0)"),
        (("0F0 0W0",), "schedule 'mine', rank 0: 0I0 is missing (stage 0, micro-batch 0)"),
        (("0F0 0F1 0B0",), "schedule 'mine', rank 0: 0B1 is missing (stage 0, micro-batch 1)"),
        (("0F0 0B1 0B0",), "schedule 'mine', rank 0: 0F1 is missing (stage 0, micro-batch 1)"),
        (
            ("0F0 1F1 0B0",),
            "schedule 'mine', rank 0: 0F1 and 0B1 are missing (stage 0, micro-batch 1)",
        ),
        (
            ("0F0 0B0 0B0",),
            "schedule 'mine', rank 0, action 2 (0B0): rank 0 has 0B0 already; a chunk goes forward once, and backward "
            "once, as B or as I and W",
        ),
        (
            ("0F0 0B0 0W0",),
            "schedule 'mine', rank 0, action 2 (0W0): rank 0 has 0B0 already; a chunk goes forward once, and backward "
            "once, as B or as I and W",
        ),
        (
            ("0B0 0F0",),
            "schedule 'mine', rank 0, action 0 (0B0): 0B0 reads what 0F0 makes, which is not done by then",
        ),
        (
            ("0B0 0F0", "1F0 1B0"),
            "schedule 'mine', rank 0, action 0 (0B0): 0B0 reads what 0F0 makes, which is not done by then",
        ),
        (
            ("0F0 0W0 0I0",),
            "schedule 'mine', rank 0, action 1 (0W0): 0W0 reads what 0I0 makes, which is not done by then",
        ),
        (
            ("(0F0;0B0)OVERLAP_F_B",),
            "schedule 'mine', rank 0, action 0 ((0F0;0B0)OVERLAP_F_B): 0B0 reads what 0F0 makes, which is not done by "
            "then",
        ),
        (
            ("(0B0;0F0)OVERLAP_F_B",),
            "schedule 'mine', rank 0, action 0 ((0B0;0F0)OVERLAP_F_B): a pair is a forward (F) and a full backward "
            "(B), in this order",
        ),
        (("0F0 0B0", "1F0 0B1 1B0"), "schedule 'mine', rank 1, action 1 (0B1): stage 0 lives on rank 0"),
        (("0F0 2B0 0B0",), "schedule 'mine', rank 0, action 1 (2B0): there is no stage 2; stages are 0 to 0"),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"),
            "schedule 'mine', rank 1, action 0 (1F0): 1RECV_F0 stands after it",
        ),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"),
            "schedule 'mine', rank 1: 1RECV_F0 is missing",
        ),
        (
            ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            "schedule 'mine', rank 0, action 0 (0SEND_F0): stands before 0F0, which makes what it sends",
        ),
        (
            ("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            "schedule 'mine', rank 0, action 1 (0SEND_F0): rank 0 has it 2 times",
        ),
        (
            ("0F0 0SEND_F0 1F0 1B0 1SEND_B0 0B0",),
            "schedule 'mine', rank 0, action 1 (0SEND_F0): no other rank is at its other end",
        ),
    ],
)
def test_each_fault_has_its_words(rows: tuple[str, ...], text: str | None) -> None:
    schedule = written(*rows)
    if text is None:
        verify(schedule)
        return
    with pytest.raises(ConfigError) as caught:
        verify(schedule)
    assert str(caught.value) == text


def test_a_send_that_waits_for_nothing_frees_what_a_rendezvous_blocks() -> None:
    verify(written(*CLASSIC), sends_wait=False)


def test_a_receive_that_comes_too_late_blocks_even_then() -> None:
    rows = ("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(ConfigError) as caught:
        verify(written(*rows), sends_wait=False)
    assert str(caught.value) == (
        "schedule 'mine' stands still for ever when a send waits for nothing: rank 0 at action 1 (0RECV_B0) waits for "
        "1SEND_B0 of rank 1; rank 1 at action 0 (1RECV_F0) waits for 0SEND_F0 of rank 0"
    )


def test_numbers_that_do_not_fit_are_named() -> None:
    schedule = make_schedule("gpipe", num_ranks=2, num_micro_batches=2)
    with pytest.raises(ConfigError) as caught:
        verify(replace(schedule, num_micro_batches=1))
    assert str(caught.value) == (
        "schedule 'gpipe', rank 0, action 1 (0F1): there is no micro-batch 1; micro-batches are 0 to 0"
    )
    with pytest.raises(ConfigError) as caught:
        verify(replace(schedule, rank_of_stage=(0, 2)))
    assert str(caught.value) == "schedule 'gpipe': stage 1 lives on rank 2, which has no row"
