"""A bound of what an allocator gives out beyond what it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from lowtide.profiling.state_bytes import fingerprint_bytes, grain_of, rounding_bytes
from lowtide.recipes.graph import Storage


def storage(index: int, nbytes: int, born: int, dies: int | None) -> Storage:
    return Storage(index=index, nbytes=nbytes, dtype=torch.uint8, name="", kind="made", born=born, dies=dies)


def test_the_host_has_no_grain() -> None:
    assert grain_of(torch.device("cpu")) == 1
    assert rounding_bytes(nn.Linear(3, 3), None, [storage(0, 1, 0, None)], (), 1) == 0


@pytest.mark.parametrize(
    ("changes", "grain"),
    [
        ([512] * 8, 512),
        ([-4096, 512, 512, 0, 512, 512, 1024, 512], 512),  # garbage was collected meanwhile, or another thread worked
        ([0] * 8, 1),  # nobody counts
        ([512 + 3] * 8, 1),  # something else than a grain
    ],
)
def test_the_grain_is_found_also_where_others_free_and_allocate(
    changes: Sequence[int], grain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection of garbage between two readings once left a plan without its rounding, and the budget was passed."""
    readings = [reading for change in changes for reading in (1 << 20, (1 << 20) + change)]
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: readings.pop(0))
    assert grain_of(torch.device("meta")) == grain


def test_fingerprints_take_a_grain_each_and_some_for_all() -> None:
    assert fingerprint_bytes([4096, 100, 4096], 1) == (0, 0)
    assert fingerprint_bytes([4096, 100, 4096], 512) == (512, 2 * 512 + 3 * 512 + 2 * 4096)
    assert fingerprint_bytes([], 4096, num_regions=3) == (4096, (3 + 2 + 3) * 4096)


def test_it_is_that_of_what_is_alive_at_once_and_of_gradients() -> None:
    storages = [
        storage(0, 500, -1, None),  # 12 bytes more than it asks for, all the time
        storage(1, 100, 2, 4),  # 412
        storage(2, 1000, 4, None),  # 24, made by the operator at which the one before dies
        storage(3, 513, 6, None),  # 511
        storage(4, 1, 3, None),  # on the host
    ]
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert rounding_bytes(frozen, None, storages, {4}, 512) == max(12 + 412 + 24, 12 + 24 + 511)
    trained = nn.Linear(4, 32, bias=False)  # 512 bytes, and no more
    assert rounding_bytes(trained, None, storages, {4}, 512) == 547
    trained = nn.Linear(4, 33, bias=False)  # 528
    assert rounding_bytes(trained, None, storages, {4}, 512) == 547 + 496
    optimizer = torch.optim.AdamW(trained.parameters())
    assert rounding_bytes(trained, optimizer, storages, {4}, 512) == 547 + 5 * 496 + 512
