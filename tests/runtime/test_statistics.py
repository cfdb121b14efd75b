"""Running statistics that the forward makes itself: a batch norm writes to them, and no version counts that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from tests.support.solved import random_plan
from tests.support.virtual_engine import virtual


class Block(nn.Module):
    """Some batch norms over one pair of made statistics, which are read afterwards."""

    def __init__(self, num_norms: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.num_norms = num_norms
        self.register_buffer("start", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        mean, var = self.start * 1, self.start + 1
        for _ in range(self.num_norms):
            x = torch.sin(F.batch_norm(x, mean, var, training=True, momentum=0.5))
        return torch.exp(mean * x)


def model(num_norms: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Block(num_norms), Block(num_norms)), torch.randn(4, 8)


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(net(x).sum(), list(net.parameters())))


def test_what_a_later_norm_writes_to_swapped_statistics_is_read_in_backward() -> None:
    for num_norms in (1, 2, 3):
        net, x = model(num_norms)
        truth = gradients(net, x)
        with lowtide.apply(net, {"min_bytes": 0, "layers": ["0", "1"], "swap": "all"}, engine=virtual(0)):
            for step in range(3):
                assert all(map(torch.equal, gradients(net, x), truth)), (num_norms, step)


def test_no_recipe_makes_statistics_as_they_were_before_a_norm() -> None:
    for num_norms in (1, 2):
        net, x = model(num_norms)
        truth = gradients(net, x)
        profile = lowtide.observe(net, (x,), loss=torch.sum)
        whys = {node.name: node.why_no_recipe for node in profile.nodes if node.name in ("0.mul", "1.mul")}
        assert whys == {"0.mul": "mutated", "1.mul": "mutated"}
        with lowtide.apply(net, random_plan(profile, 0, made=1.0, swapped=1.0), engine=virtual(0)) as tide:
            for step in range(3):
                assert all(map(torch.equal, gradients(net, x), truth)), (num_norms, step)
            assert tide.failed_recipes == {}


def test_statistics_too_large_to_be_copied_beforehand_are_put_back_after_the_observed_step() -> None:
    norm = nn.BatchNorm1d(300_000)
    lowtide.observe(norm, (torch.ones(2, 300_000),), loss=torch.sum)
    assert not norm.running_mean.any()
    assert bool((norm.running_var == 1).all())
