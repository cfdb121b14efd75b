"""Every test begins with an idle device without a cap and a record of violations that is empty, and ends so."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.standin import device
from tests.support import zoo


@pytest.fixture(autouse=True, scope="session")
def _frozen() -> None:
    """Half a million objects of torch and transformers are not looked at in each collection of garbage."""
    zoo.plain_result("llama", 3)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _idle_device() -> Iterator[None]:
    device.play("late")
    device.forget_violations()
    torch.accelerator.set_device_index(0)
    yield
    device.play("late")
    for number in range(device.NUM_DEVICES):
        device.set_cap(None, number)
    device.set_speeds()
    gc.collect()
    left = device.violations()
    device.forget_violations()
    assert left == [], "a test that causes violations looks at them, and forgets them"
