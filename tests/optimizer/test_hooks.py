"""A dropped optimizer is gone, though its model lives; what it had put off is done first."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.optimizer_zoo import swapped
from tests.support.virtual_engine import VirtualEngine


@pytest.mark.parametrize("overlap", ["step", "backward", "in_backward"])
def test_hooks_do_not_keep_a_dropped_optimizer(overlap: str) -> None:
    weights = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = VirtualEngine(0)
        handle = swapped(optimizer, engine, overlap=overlap) if is_swapped else None
        for _ in range(3):
            model(torch.ones(3, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        alive = [weakref.ref(one) for one in (optimizer, engine, handle) if one is not None]
        del optimizer, engine, handle
        gc.collect()
        model(torch.ones(3, 24)).square().mean().backward()
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)
        model(torch.ones(3, 24)).square().mean().backward()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
