"""What counts as an activation: the modules and storages of a model, and what autograd knows to be a parameter's."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.tensors.kinds import leads_to_parameter, modules_of, storage_keys


class Owner(nn.Module):
    """Has a shared part, a name with nothing behind it, a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3, bias=False)
        self.stack = nn.Sequential(self.shared, nn.BatchNorm1d(3), nn.Sequential(nn.ReLU(), self.shared))
        self.register_module("missing", None)
        self.register_parameter("none", None)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.shared.weight


def test_the_walk_finds_the_modules_that_torchs_own_walk_finds() -> None:
    owner = Owner()
    assert {*modules_of(owner)} == {*owner.modules()}
    assert len(modules_of(owner)) == len([*owner.modules()])
    assert modules_of(owner)[0] is owner


def test_storages_are_those_of_all_parameters_and_buffers() -> None:
    owner = Owner()
    tensors = [*owner.parameters(), *owner.buffers()]
    assert len(storage_keys(owner)) == len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_a_node_of_ones_own_that_has_a_variable_is_no_parameter() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = weight
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    weight = nn.Parameter(torch.ones(3, 3))
    assert leads_to_parameter(weight.t().to(torch.bfloat16))
    assert not leads_to_parameter(weight.detach())
    assert not leads_to_parameter(torch.ones(3, requires_grad=True).view(3, 1))
    assert not leads_to_parameter(Own.apply(weight.exp()))
