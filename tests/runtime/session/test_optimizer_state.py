"""Plans that move optimizer state are made and read; whoever would have to carry one out says that he does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

import lowtide
from lowtide.config.memory import load_memory, plan_from_rules
from lowtide.core.decisions import OptimizerPlacement
from lowtide.mindformers.follow import follow, sections_in

TEXT = (
    "memory.optimizer: lowtide 0.1 plans for state that is elsewhere between steps, and does not move it yet: write "
    "optimizer: keep"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "way",
    [
        lambda: lowtide.apply(Net(), {"optimizer": "swap"}),
        lambda: lowtide.optimize(Net(), budget="1GiB", memory={"optimizer": "swap"}),
        lambda: lowtide.apply(Net(), dataclasses.replace(
            plan_from_rules(load_memory({}), ["layers.0", "layers.1"]),
            optimizer=OptimizerPlacement(moved_bytes=1, reason=""),
        )),
        lambda: follow(Net(), sections_in({"recompute_config": {"recompute": True}}),
                       memory=load_memory({"optimizer": "swap"})),
    ],
)  # fmt: skip
def test_every_way_in_says_so(way: Any) -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        way()
    assert str(caught.value) == TEXT


def test_state_that_may_stay_stays() -> None:
    with lowtide.optimize(Net(), budget="1GiB", memory={"optimizer": "auto"}) as tide:
        assert tide is not None
    rules = plan_from_rules(load_memory({"optimizer": "swap"}), [])
    assert rules.optimizer == OptimizerPlacement(moved_bytes=None, reason="memory.optimizer asks for it")
    assert plan_from_rules(load_memory({"optimizer": "auto"}), []).optimizer is None
