"""What an operator's indices stay below by its definition, asked of the operators that made them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowtide.recipes.graph import Value, index_limit
from lowtide.tensors.codecs import kinds_below
from tests.support.recording import record

CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], int]] = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (2, 3, 10), 10),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, padding=1), (2, 3, 6, 10), 60),
    "max_pool2d of one image": (lambda x: F.max_pool2d(x, 2, dilation=2), (3, 6, 10), 60),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (2, 3, 4, 6, 5), 120),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), (2, 3, 6, 10), 60),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (2, 4, 6, 5), 120),
    "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 2, output_size=3), (2, 3, 6, 10), 60),
    "fractional_max_pool3d": (lambda x: F.fractional_max_pool3d(x, 2, output_size=2), (2, 4, 6, 5), 120),
    "sort": (lambda x: x.sort()[0], (4, 7), 7),
    "sort, stable": (lambda x: x.sort(stable=True, dim=0)[0], (4, 7), 4),
    "topk": (lambda x: x.topk(2, dim=0)[0], (4, 7), 4),
    "max": (lambda x: x.max(dim=1)[0], (4, 7), 7),
    "min": (lambda x: x.min(dim=-2)[0], (4, 7), 4),
    "median": (lambda x: x.median(dim=1)[0], (4, 7), 7),
    "mode": (lambda x: x.mode(dim=0)[0], (4, 7), 4),
    "kthvalue": (lambda x: x.kthvalue(2, dim=0)[0], (4, 7), 4),
    "cummax": (lambda x: x.cummax(0)[0], (4, 7), 4),
}


def limits_of(made: Callable[[Tensor], Tensor], size: tuple[int, ...]) -> list[tuple[int | None, Tensor]]:
    """For each storage of indices that the call saves: its limit, and the indices."""
    torch.manual_seed(0)
    x = torch.randn(size, requires_grad=True)
    recording = record(nn.Module(), lambda: made(x).sum())
    values = tree_leaves([(call.args, call.kwargs, call.outputs) for call in recording.calls])
    storages = {value.storage.name: value.storage for value in values if isinstance(value, Value)}
    saved = [(name, bits) for name, bits in recording.bits.items() if storages[name].dtype is torch.int64]
    return [(index_limit(storages[name]), bits.view(torch.int64)) for name, bits in saved]


@pytest.mark.parametrize("name", CASES)
def test_indices_are_below_their_limit(name: str) -> None:
    made, size, limit = CASES[name]
    ((found, indices),) = limits_of(made, size)
    assert found == limit
    assert 0 <= int(indices.min()) <= int(indices.max()) < limit


def test_other_integers_have_no_limit() -> None:
    for made in (
        lambda x: x.gather(0, torch.tensor([[1, 2]])),  # came with the batch
        lambda x: x.gather(0, x.detach().argsort(0) + 0),  # made by an operator that may give anything
        lambda x: x.gather(0, x.detach().sort(0)[1].mul_(0)),  # written to
    ):
        assert [limit for limit, _ in limits_of(made, (4, 7))] == [None]


def test_the_least_type_that_holds_the_largest_index() -> None:
    narrowest = {1: "uint8", 256: "uint8", 257: "int16", 1 << 15: "int16", (1 << 15) + 1: "int32", 1 << 31: "int32"}
    assert {limit: kinds_below(torch.int64, limit)[0] for limit in narrowest} == narrowest
    assert kinds_below(torch.int64, (1 << 31) + 1) == kinds_below(torch.int64, None) == ()
    assert kinds_below(torch.int16, 300) == kinds_below(torch.float32, 5) == kinds_below(torch.bool, 1) == ()
