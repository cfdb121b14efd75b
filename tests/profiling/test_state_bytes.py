"""Which part of an optimizer's state may be elsewhere between steps, counted without taking a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.core.profile import StateBytes
from lowtide.profiling.state_bytes import MOVABLE_ELEMENTS, state_bytes
from lowtide.tensors.optimizers import CUT_ELEMENTS

LARGE, SMALL = 200 * 100, 100  # elements of the weight and of the bias


def counted(make: Callable[..., torch.optim.Optimizer], *, is_accelerator: bool = True, **settings: Any) -> StateBytes:
    model = nn.Linear(200, 100)
    optimizer = make(model.parameters(), **settings)
    return state_bytes(model, inputs=0, optimizer=optimizer, device_type="cpu", is_accelerator=is_accelerator)


@pytest.mark.parametrize(
    ("make", "settings", "movable"),
    [
        (torch.optim.AdamW, {}, 2 * 4 * LARGE),
        (torch.optim.AdamW, {"amsgrad": True}, 3 * 4 * LARGE),
        (torch.optim.SGD, {"momentum": 0.9}, 4 * LARGE),
        (torch.optim.SGD, {}, 0),
        (torch.optim.Adagrad, {}, 4 * LARGE),
    ],
)
def test_live_chunks_can_move_and_what_is_small_stays(make: Any, settings: dict[str, Any], movable: int) -> None:
    state = counted(make, **settings)
    assert LARGE >= MOVABLE_ELEMENTS > SMALL
    assert state.optimizer_movable == movable
    assert state.optimizer - movable < 4 * 4 * (SMALL + 200 + 2)


def test_a_bucket_must_hold_the_largest_parameter() -> None:
    assert counted(torch.optim.AdamW).optimizer_unit == 2 * 4 * LARGE


@pytest.mark.parametrize(
    ("settings", "num_groups", "expected"),
    [
        ({"foreach": True}, 1, 1.0),
        ({"foreach": True}, 2, 2 / 3),
        ({"foreach": False}, 1, 1 / 2),
        ({"fused": True}, 1, 1.0),
    ],
)
def test_temporaries_are_of_what_is_stepped_at_once(settings: dict, num_groups: int, expected: float) -> None:
    """A list of a group's parameters; or one parameter after the other, while what the last one needed is there yet; a
    fused step has none."""
    parameters = [nn.Parameter(torch.zeros(128, 128)) for _ in range(3)]
    groups = [{"params": parameters[number::num_groups]} for number in range(num_groups)]
    optimizer = torch.optim.AdamW(groups, **settings)
    model = nn.ParameterList(parameters)
    state = state_bytes(model, inputs=0, optimizer=optimizer, device_type="cpu", is_accelerator=False)
    assert (state.optimizer_temporaries == 0) == bool(settings.get("fused"))
    assert state.optimizer_share_at_once == pytest.approx(expected, rel=0.01)


class Own(torch.optim.AdamW):
    """A user's: nobody knows what it looks at."""


@pytest.mark.parametrize(
    ("make", "dtype", "is_accelerator", "elements"),
    [
        (torch.optim.AdamW, torch.float32, True, CUT_ELEMENTS),
        (torch.optim.AdamW, torch.float32, False, CUT_ELEMENTS),
        (torch.optim.AdamW, torch.bfloat16, True, CUT_ELEMENTS),
        (torch.optim.AdamW, torch.bfloat16, False, 500 * 400),
        (Own, torch.float32, True, 500 * 400),
    ],
)
def test_or_a_stretch_of_it_where_it_may_be_cut(make: Any, dtype: Any, is_accelerator: bool, elements: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = nn.Linear(500, 400, dtype=dtype)
    optimizer = make(model.parameters())
    state = state_bytes(model, inputs=0, optimizer=optimizer, device_type="cpu", is_accelerator=is_accelerator)
    torch.set_num_threads(threads)
    assert state.optimizer_unit == 2 * dtype.itemsize * elements
    assert state.optimizer_movable == 2 * dtype.itemsize * 500 * 400


def test_state_that_is_there_counts_where_no_copy_can_step() -> None:
    class Reads(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].grad.sum().item()
            return super().step(closure)

    model = nn.Linear(200, 100)
    optimizer = Reads(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="cannot step without values"):
        state = state_bytes(model, inputs=0, optimizer=optimizer, device_type="cpu", is_accelerator=True)
    assert (state.optimizer_movable, state.optimizer) == (4 * LARGE, 4 * (LARGE + SMALL))
