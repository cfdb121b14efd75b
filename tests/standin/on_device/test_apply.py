"""`lowtide.apply` on the real accelerator engine, on streams that are late, early, or anything between."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engines.base import Lane
from lowtide.tensors.view import byte_view
from tests.standin import device, engines, swaps
from tests.standin.swaps import Run
from tests.support import zoo
from tests.support.grid import one_of

SWAP_ALL = {"swap": "all", "min_bytes": 0}
DEVICES = [torch.device(device.NAME, number) for number in range(2)]
NAMES = sorted(zoo.CASES.keys() - {"sparse"})  # the device has no sparse tensors


def drawn(seed: int) -> tuple[Run, str | int, float]:
    """A model, a plan, a window and an adversary."""
    draw = Random(seed)
    name = draw.choice(NAMES)
    case = zoo.CASES[name]
    layers = list(case.layers)
    plan: dict[str, Any] = draw.choice([
        SWAP_ALL,
        {"swap": "all", "min_bytes": draw.choice([0, 512, 4096])},
        {"swap": draw.sample(layers, draw.randint(1, len(layers))), "min_bytes": 0},
        {"swap": [{"match": layer, "prefetch": draw.randint(0, 3)} for layer in layers], "min_bytes": 0},
        *(case.mixed_plans or [SWAP_ALL]),
    ])  # fmt: skip
    if draw.random() < 0.04:
        plan = {"swap": [{"match": layer, "tier": "disk"} for layer in layers], "min_bytes": 0}
    run = Run(
        name=name,
        plan=plan,
        num_steps=draw.choice([1, 2, 3]),
        accumulate=draw.choice([1, 1, 2]),
        seed=draw.randint(0, 3),
        window_bytes=draw.choice([0, 0, 4096, None]),
        device=torch.device(device.NAME, draw.choice([0, 0, 0, 1])),
    )
    return run, draw.choice(["late", "early", seed, seed, seed]), draw.choice([0.05, 0.3, 0.6, 0.95])


def check(seed: int) -> None:
    run, policy, chance = drawn(seed)
    swaps.plain(run)  # before the adversary is chosen: the truth does not depend on it
    device.play(policy, chance)
    result, _ = swaps.swapped(run)
    swaps.assert_as_plain(result, run)
    assert device.violations() == []


@pytest.mark.parametrize("seed", one_of(3, [*range(20), 86, 104], first=2))  # the last two: complex numbers
def test_any_model_under_any_adversary(seed: int) -> None:
    check(seed)


def test_layers_that_draw_are_run_again_with_the_device_s_random_state() -> None:
    run = Run(name="draws", plan={"recompute": "all"})
    swaps.plain(run)
    result, stats = swaps.swapped(run)
    assert stats.recomputed_bytes > 0
    swaps.assert_as_plain(result, run)


@pytest.mark.extended
@pytest.mark.parametrize("first", range(20, 2_020, 50))
def test_two_thousand_of_them(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed)


# -- mistakes of an engine, each of which must be noticed --------------------------------------------------------------


class OnTwo(nn.Module):
    """A tower on each of two devices, which have nothing to do with each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [[nn.Linear(32, 32), nn.Tanh()] * 3 for _ in DEVICES]
        self.towers = nn.ModuleList(nn.Sequential(*block).to(where) for block, where in zip(blocks, DEVICES))

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """`inputs`: some, on any of the devices, in any order."""
        return [self.towers[x.device.index](x).square().mean() for x in inputs]


def train_on_two(engine: Any) -> list[torch.Tensor]:
    """Gradients of some steps; plain where there is no engine."""
    model = OnTwo()
    with contextlib.ExitStack() as stack:
        if engine is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that only one device is swapped
                tide = stack.enter_context(lowtide.apply(model, SWAP_ALL, engine=engine))
            tide._scheduler.window.min_bytes = 0
        for step in range(12):  # until host memory is reused, with queries that say no
            order = Random(step).choices(DEVICES, k=3)
            for loss in model([torch.full((64, 32), 0.1 * (step + 1), device=where) for where in order]):
                loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


def by_hand(engine: Any) -> list[bool]:
    """Swaps as the engine's own rules have it, without a scheduler that orders more than it must: what came back is
    right."""
    compute, right = torch.accelerator.current_stream(), []
    places = [torch.empty(5000, dtype=torch.uint8, device=DEVICES[0]) for _ in range(3)]
    slots, left = [], []
    for i in range(9):
        if i >= 3:
            engine.wait(Lane.COMPUTE, left[i - 3])
        places[i % 3].fill_(i + 1)
        slots.append(engine.allocate(5000, "host"))
        engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
        engine.copy_out(places[i % 3].untyped_storage(), slots[i])
        left.append(engine.record(Lane.OUT))
    for i in reversed(range(9)):
        buffer = engine.new_buffer(5000, DEVICES[0])
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        engine.wait(Lane.IN, left[i])
        engine.copy_in(slots[i], buffer)
        engine.wait(Lane.COMPUTE, engine.record(Lane.IN))
        right.append(byte_view(buffer) == i + 1)
    compute.synchronize()
    torch.accelerator.synchronize(DEVICES[0])
    return [bool(each.all()) for each in right]


@pytest.mark.parametrize(
    "policy", ["late", *(pytest.param(each, marks=pytest.mark.extended) for each in ("hidden", 1, 2))]
)
@pytest.mark.parametrize("mutant", engines.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_noticed_in_every_run(mutant: Any, policy: str | int) -> None:
    run = Run(name="llama", plan=SWAP_ALL)
    plain_on_two = train_on_two(None)
    swaps.plain(run)
    device.play(policy, 0.3)
    engine = mutant()
    try:
        are_right = [_is_right(run, engine), _gives(lambda: train_on_two(engine), plain_on_two)]
        are_right.append(_gives(lambda: by_hand(engine), [True] * 9))
    finally:
        device.play("early")  # what is under way ends
        engine.close()
    violations = device.violations()
    device.forget_violations()
    assert violations, "the order proof saw nothing"
    assert policy != "late" or not all(are_right) or not mutant.is_in_the_bytes, (
        "bytes that come as late as they may are right"
    )


def _is_right(run: Run, engine: Any) -> bool:
    try:
        swaps.assert_as_plain(swaps.swapped(run, engine)[0], run)
    except (AssertionError, RuntimeError, IndexError):
        return False
    return True


def _gives(make: Callable[[], list], wanted: list) -> bool:
    try:
        return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(make(), wanted, strict=True))
    except (AssertionError, RuntimeError, IndexError):
        return False


@pytest.mark.parametrize("policy", one_of(2, ["late", "early", "hidden", 1, 2]))
def test_the_real_engine_is_none_of_them(policy: str | int) -> None:
    run = Run(name="llama", plan=SWAP_ALL)
    swaps.plain(run)
    plain_on_two = train_on_two(None)
    device.play(policy)
    engine = engines.Mutant()
    result, stats = swaps.swapped(run, engine)
    swaps.assert_as_plain(result, run)
    assert stats.copied_in_bytes > 0
    assert _gives(lambda: train_on_two(engine), plain_on_two)
    if policy == "late":
        assert len(engine.waits) == 5, "every kind of wait that the mutants forget is made in these runs"
    assert by_hand(engine) == [True] * 9
    engine.close()
    assert device.violations() == []
