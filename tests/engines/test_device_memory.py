"""Main memory as a device: of the cgroup or the machine, shared by the ranks of the machine, the model's own
included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.engines.choose import device_memory, memory_of_model
from lowtide.errors import ConfigError
from lowtide.units import GIB

CPU = torch.device("cpu")


def tree(root: Path, *, limit: str | None) -> Path:
    """64 GiB, of which 48 are free; a cgroup that has 4 of its `limit` in use."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")
    (root / "proc/self/cgroup").write_text("0::/job\n")
    if limit is not None:
        group = root / "sys/fs/cgroup/job"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(str(4 * GIB))
    return root


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_of_the_cgroup_where_it_allows_less(tmp_path: Path) -> None:
    found = device_memory(CPU, own_bytes=GIB, root=tree(tmp_path, limit=str(16 * GIB)))
    assert (found.total_bytes, found.free_bytes) == (16 * GIB, 13 * GIB)
    assert found.where == "of main memory (cgroup /job)"


@pytest.mark.parametrize("limit", [None, "max"])
def test_of_the_machine_where_no_cgroup_limits_it(tmp_path: Path, limit: str | None) -> None:
    found = device_memory(CPU, own_bytes=0, root=tree(tmp_path, limit=limit))
    assert (found.total_bytes, found.free_bytes, found.where) == (64 * GIB, 48 * GIB, "of main memory (machine)")


def test_ranks_of_one_machine_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = device_memory(torch.device("meta"), own_bytes=GIB, root=tree(tmp_path, limit=None))
    assert (found.total_bytes, found.free_bytes) == (16 * GIB, 13 * GIB)
    assert found.where == "of main memory (machine for 4 ranks)"


def test_where_nothing_says_how_much_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        device_memory(CPU, own_bytes=0, root=tmp_path)
    assert str(caught.value) == (
        "budget: nothing says how much main memory there is, so that a share of it and 'auto' mean nothing; write a "
        "size such as 20GiB"
    )


def test_what_the_model_holds_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("lowtide.engines.choose.device_memory", lambda device, *, own_bytes: seen.append(own_bytes))
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.BatchNorm1d(100))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    bare = 40_000 + 2 * 400 + 2 * 400 + 8
    memory_of_model(model, optimizer)
    model(torch.ones(2, 100)).sum().backward()
    memory_of_model(model, optimizer)
    optimizer.step()
    memory_of_model(model, optimizer)
    memory_of_model(model.to("meta"))
    assert seen == [bare, bare + 40_800, bare + 2 * 40_800, 0]
