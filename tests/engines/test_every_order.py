"""Every order in which up to eight copies may complete, as far as a program can see it, on the virtual engine.

A program sees an order by its queries: each answers yes or no, and a yes stays one. `Answers` goes through all of them,
depth first. Waits that are forgotten are found in every one of these orders, by the order of accesses alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowtide.engines.base import Lane
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import PrefetchQueue
from lowtide.tensors.view import byte_view
from tests.support.virtual_engine import VirtualEngine

NBYTES = 64


class Answers:
    """Stands for the engine's random numbers: a path through the tree of yes and no, and then always no."""

    def __init__(self, path: list[bool]) -> None:
        self.path = path
        self.taken: list[bool] = []

    def random(self) -> float:
        answer = self.path[len(self.taken)] if len(self.taken) < len(self.path) else False
        self.taken.append(answer)
        return 0.0 if answer else 1.0

    def following(self) -> list[bool] | None:
        """The next path, or None after the last: the last no becomes a yes."""
        if False not in self.taken:
            return None
        last = len(self.taken) - 1 - self.taken[::-1].index(False)
        return [*self.taken[:last], True]


def every_order(run: Callable[[VirtualEngine], None], most: int = 100_000) -> list[list[str]]:
    """`run` once for each way in which the queries may be answered: the violations of each."""
    found: list[list[str]] = []
    path: list[bool] | None = []
    while path is not None:
        assert len(found) < most
        engine = Forgetful()
        answers = Answers(path)
        engine._random, engine._chance = answers, 0.5  # type: ignore[assignment]
        run(engine)
        found.append(engine.violations)
        path = answers.following()
    return found


class Forgetful(VirtualEngine):
    """An engine whose waits of one lane for another are lost."""

    forgotten: tuple[Lane, Lane] | None = None

    def wait(self, lane, event):
        return 0.0 if (lane, event.lane) == self.forgotten else super().wait(lane, event)


def swap_pass(num_sites: int, *, is_tight: bool) -> Callable[[VirtualEngine], None]:
    """A forward pass that saves and sends so many sites, and a backward pass that reads them from the end."""

    def run(engine: VirtualEngine) -> None:
        scheduler = OffloadScheduler(engine)
        scheduler.window.min_bytes = 0 if is_tight else 2**20
        queue, sites = PrefetchQueue(), []
        for number in range(num_sites):
            storage = torch.full((NBYTES,), number + 1, dtype=torch.uint8).untyped_storage()
            sites.append(scheduler.enroll(queue, storage, 0, None, None))
            sites[-1].num_readers = 1
            del storage
            scheduler.start_offload(sites[-1], None)
        while sites:
            site, value = sites.pop(), len(sites) + 1
            assert (byte_view(site.read()) == value).all()
            del site
        scheduler.settle()
        assert (scheduler.num_open(), engine.num_slots) == (0, 0)

    return run


@pytest.mark.parametrize(
    ("num_sites", "is_tight", "num_orders"),
    [
        (1, True, 6),
        (2, True, 57),
        (3, True, 636),
        (3, False, 608),
        pytest.param(4, True, None, marks=pytest.mark.extended),
        pytest.param(4, False, None, marks=pytest.mark.extended),
    ],
)
def test_a_copy_out_and_one_in_of_each_site_in_every_order(
    num_sites: int, is_tight: bool, num_orders: int | None
) -> None:
    found = every_order(swap_pass(num_sites, is_tight=is_tight))
    assert not any(found)
    assert len(found) == num_orders or (num_orders is None and len(found) > 5_000)


def by_hand(forgotten: str | None) -> Callable[[VirtualEngine], None]:
    """Four copies out and four in, with the orders that they need and no other; one kind of them is left out."""

    def run(engine: VirtualEngine) -> None:
        slots, left, sources = [], [], []
        for number in range(4):
            sources.append(torch.full((NBYTES,), number, dtype=torch.uint8).untyped_storage())
            slots.append(engine.allocate(NBYTES, "host"))
            if forgotten != "out behind compute":
                engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
            engine.copy_out(sources[-1], slots[-1])
            left.append(engine.record(Lane.OUT))
            engine.query(left[0])
        buffers = []
        for slot, event in zip(slots, left, strict=True):
            buffers.append(engine.new_buffer(NBYTES, torch.device("cpu")))
            if forgotten != "in behind compute":
                engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
            if forgotten != "in behind out":
                engine.wait(Lane.IN, event)
            engine.copy_in(slot, buffers[-1])
            arrived = engine.record(Lane.IN)
            engine.query(arrived)
            if forgotten != "free behind in":
                engine.wait(Lane.COMPUTE, arrived)
            engine.free(slot)
        engine.close()

    return run


@pytest.mark.parametrize("forgotten", ["out behind compute", "in behind compute", "in behind out", "free behind in"])
def test_a_forgotten_order_is_found_wherever_nothing_else_makes_it(forgotten: str) -> None:
    assert not any(every_order(by_hand(None)))
    found = every_order(by_hand(forgotten))
    # Where the queries said yes early enough the host itself knew the order, and nothing is missing.
    assert sum(bool(violations) for violations in found) >= 0.9 * len(found)
    assert found[0]
