"""Training steps on the stand-in under lowtide, as its tests run them: one function, whatever engine and adversary."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import lowtide
from lowtide.engines.base import Engine
from tests.standin import device
from tests.support import zoo

HERE = torch.device(device.NAME, 0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and for how long."""

    name: str
    """A case of the zoo."""
    plan: Mapping[str, Any]
    num_steps: int = 2
    accumulate: int = 1
    seed: int = 3
    window_bytes: int | None = 0
    """The smallest window of bytes in flight; with 0 the models of the zoo are larger than it. None: as it comes."""
    device: torch.device = HERE


def plain(run: Run) -> zoo.Result:
    """The truth."""
    return zoo.plain_result(run.name, run.seed, run.num_steps, run.accumulate, str(run.device))


def swapped(run: Run, engine: Engine | None = None) -> tuple[zoo.Result, Any]:
    """The same under lowtide: what the steps left, and the stats. Raises AssertionError where memory was not given
    back."""
    case = zoo.CASES[run.name]
    before_bytes = _allocated_bytes(run.device)
    model = case.build(run.seed, run.device)
    optimizer = zoo.make_optimizer(model)
    tide = lowtide.apply(model, run.plan, optimizer=optimizer, engine=engine)
    if run.window_bytes is not None:
        tide._scheduler.window.min_bytes = run.window_bytes
    try:
        steps = {"num_steps": run.num_steps, "accumulate": run.accumulate, "device": run.device}
        result = zoo.train(case, model, optimizer, run.seed, **steps)
        stats = tide.stats
        tide.settle()
        in_use = tide.engine.memory_in_use()
    finally:
        tide.remove()
    result = _on_host(result)
    del model, optimizer, tide
    assert not any(in_use.values()), f"{in_use} are still reserved"
    after_bytes = _allocated_bytes(run.device)
    assert after_bytes == before_bytes, f"{after_bytes} bytes of the device are held, and were {before_bytes} before"
    return result, stats


def assert_as_plain(result: zoo.Result, run: Run) -> None:
    zoo.assert_same(result, _on_host(plain(run)))


def _allocated_bytes(device: torch.device) -> int:
    """What is held there now. A worker of autograd's that was not scheduled yet still holds the last backward pass,
    with the callbacks that lowtide gave it, until it takes the next one: so it gets one."""
    torch.ones((), device=device, requires_grad=True).clone().backward()
    gc.collect()
    return torch.accelerator.memory_allocated(device)


def _on_host(result: zoo.Result) -> zoo.Result:
    parts = {name: {k: v.cpu() for k, v in part.items()} for name, part in vars(result).items()}
    return zoo.Result(**parts)
