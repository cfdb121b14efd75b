"""A disk that is full, and a process that is killed: nothing is lost that a plain optimizer would have.

A device without memory for buckets: test_on_streams.py and test_resident_share.py. A file that cannot be written:
test_step.py.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engines.host import HostEngine
from lowtide.engines.tiers import disk
from tests.support import processes
from tests.support.optimizer_zoo import Case, assert_same, result_of, swapped

CASE = Case("AdamW", "foreach", torch.float32, has_missing=True)


def _eight_steps(*pairs: Any) -> None:
    for step in range(8):
        for parameters, optimizer in pairs:
            CASE.set_gradients(parameters, step)
            optimizer.step()


@pytest.mark.parametrize("num_growths", [0, 1])
def test_a_disk_that_is_full_leaves_state_on_the_device(
    num_growths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first byte, or once some of the state is there; and what comes later finds room again."""
    fallocate, calls = os.posix_fallocate, []

    def full(*args: Any) -> None:
        calls.append(args)
        if num_growths < len(calls) < num_growths + 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(*args)

    parameters, optimizer = CASE.build()
    plain_parameters, plain = CASE.build()
    engine = HostEngine(directory=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(disk, "GROW_BYTES", 4096)
    handle = swapped(optimizer, engine)
    with pytest.warns(RuntimeWarning, match=r"bytes of optimizer state stay on cpu: disk: no room for "):
        _eight_steps((parameters, optimizer), (plain_parameters, plain))
    assert handle.stats.swapped_bytes > 0
    assert_same(result_of(parameters, optimizer), result_of(plain_parameters, plain))
    handle.detach()
    assert engine.memory_in_use() == {"disk": 0}
    engine.close()


class Dying(HostEngine):
    """Dies in the middle of a step: one has four copies."""

    num_copies = 0

    def copy_in(self, slot: Any, target: Any) -> None:
        super().copy_in(slot, target)
        self.num_copies += 1
        if self.num_copies == 15:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: Path, *, start: int = 0, dies: bool = False) -> list[str]:
    parameters = [torch.nn.Parameter(torch.full((24, 24), 0.1 * number)) for number in range(4)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    if dies:
        lowtide.swap_optimizer(optimizer, engine=Dying(directory=folder), bucket_bytes=4608, min_bytes=1)
    if start:
        saved, state = torch.load(folder / "saved.pt")
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.copy_(value)
    for step in range(start, 8):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 0.3 * step - 0.1 * number)
        optimizer.step()
        if step == 1 and dies:
            torch.save(([p.detach() for p in parameters], optimizer.state_dict()), folder / "saved.pt")
    assert not dies
    return [p.detach().double().sum().item().hex() for p in parameters]


def _until_it_dies(folder: Path) -> None:
    _train(folder, dies=True)


def test_a_process_that_is_killed_in_a_step_leaves_its_checkpoint_and_no_file(tmp_path: Path) -> None:
    """State in a file is scratch, gone with its process; training goes on from what was saved, to the same bits."""
    (process,) = processes.fork(_until_it_dies, [(tmp_path,)])
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["saved.pt"]
    assert _train(tmp_path, start=2) == _train(tmp_path)
