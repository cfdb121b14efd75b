"""How long the way of a tensor is, swapped or kept, from the moment that autograd saves it until it is opened.

Counted with `sys.setprofile`: calls of Python functions of the package, and the files they stand in, on the host
engine. The tensor in the middle stands for all: what starts the copies of others (the first one opened) has more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

PACKAGE = str(Path(lowtide.__file__).parent)
STARTS = ("ForwardPass.pack", "open_handle")
MOST_CALLS = 150
MOST_FILES = 16
"""Today's; the aim is 8."""
MEMORY = {
    "rules": {"swap": "all", "min_bytes": 1},
    "a budget": {"budget": "150KiB", "recompute": "none", "min_bytes": 1},
}


class Counted:
    """Each way from a start into the package: where it started, and the file of each call."""

    def __init__(self) -> None:
        self.ways: list[tuple[str, list[str]]] = []
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        name = frame.f_code.co_qualname
        if event == "return":
            self._depth -= self._depth > 0
        elif event == "call" and (self._depth or name in STARTS):
            if not self._depth:
                self.ways.append((name, []))
            self._depth += 1
            self.ways[-1][1].append(frame.f_code.co_filename)

    def middle(self, start: str) -> list[str]:
        """The files called on the way that is in the middle by length, of those on which a tensor was swapped."""
        ways = [calls for name, calls in self.ways if name == start and any("offload" in file for file in calls)]
        return sorted(ways, key=len)[len(ways) // 2]


@pytest.mark.filterwarnings("ignore:lowtide. no plan of Sequential")  # the floor it is, where most is swapped
@pytest.mark.parametrize("memory", list(MEMORY))
def test_a_swapped_tensor_takes_a_short_way(memory: str, tmp_path: Path) -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(32, 64)
    counted = Counted()
    with lowtide.apply(model, {**MEMORY[memory], "disk_path": str(tmp_path)}, engine="host") as tide:
        for _ in range(3):
            model(x).sum().backward()
        assert tide.stats is not None
        swapped_bytes = tide.stats.swapped_bytes
        sys.setprofile(counted)
        try:
            model(x).sum().backward()
        finally:
            sys.setprofile(None)
        assert tide.stats.swapped_bytes > swapped_bytes
    saved, opened = (counted.middle(start) for start in STARTS)
    assert len(saved) + len(opened) <= MOST_CALLS
    assert len({*saved, *opened}) <= MOST_FILES


@pytest.mark.parametrize(("limit_bytes", "most_calls"), [(None, 7), (2**40, 9)])
def test_a_kept_tensor_takes_a_shorter_one(limit_bytes: int | None, most_calls: int) -> None:
    """Most tensors of a planned step are kept, and the budget's guard watches them."""
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]), torch.randn(32, 64)
    counted = Counted()
    with lowtide.apply(model, {"min_bytes": 1}, engine="host") as tide:
        tide.set_limit(limit_bytes)
        for _ in range(3):
            model(x).sum().backward()
        sys.setprofile(counted)
        try:
            model(x).sum().backward()
        finally:
            sys.setprofile(None)
    calls = sum(len(files) for name, files in counted.ways if name in STARTS)
    num_saved = sum(name == STARTS[0] for name, _ in counted.ways)
    assert num_saved >= 17
    assert calls / num_saved <= most_calls
