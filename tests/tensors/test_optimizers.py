"""The user's optimizer is read and never written through, whatever wraps it or is wrapped by it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lowtide
from lowtide.profiling.state_bytes import state_bytes
from lowtide.tensors.live_bytes import optimizer_tensors
from lowtide.tensors.optimizers import bare

HEARD: list[str] = []


class Through(torch.optim.Optimizer):
    """As Accelerate's: every attribute is a property that reads and writes the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Scaled:
    """As apex's: no optimizer of torch's at all, with one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


class Lightning:
    """As Lightning's: everything is looked up in the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Lookahead(torch.optim.Optimizer):
    """State of its own, and an optimizer inside that its step steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, inside: Callable[[Any], Any] = lambda optimizer: optimizer):
        self.fast = inside(optimizer)
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        fast: Any = self.fast
        (fast if isinstance(fast, torch.optim.Optimizer) else fast.__self__ if callable(fast) else fast.one).step()


class Holder:
    def __init__(self, one: torch.optim.Optimizer) -> None:
        self.one = one


class Slots(torch.optim.SGD):
    """Counts in a slot, in an object and in a list that a shallow copy shares."""

    __slots__ = ("number",)

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.number = 0
        self.holder = Holder(None)  # type: ignore[arg-type]
        self.lengths: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        self.lengths.append(1.0)
        self.holder.one = "stepped"  # type: ignore[assignment]
        super().step(closure)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _facts(optimizer: Any, model: nn.Module) -> list:
    """Every object that the optimizer is made of, by identity, and what it would do."""
    groups = [(id(group), dict(group), [id(p) for p in group["params"]]) for group in optimizer.param_groups]
    state = {
        id(p): {key: (id(value), str(value)) for key, value in slots.items()} for p, slots in optimizer.state.items()
    }
    attributes = {key: id(value) for key, value in vars(optimizer).items()}
    tensors = [(id(p), p.tolist(), p._version, id(p.grad)) for p in model.parameters()]
    return [id(optimizer.param_groups), groups, id(optimizer.state), state, attributes, tensors]


def _bytes(model: nn.Module, optimizer: Any) -> int:
    sizes = state_bytes(model, inputs=0, optimizer=optimizer, device_type="cpu", is_accelerator=False)
    return sizes.optimizer


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "itself": lambda optimizer: optimizer,
    "accelerate": Through,
    "twice": lambda optimizer: Through(Through(optimizer)),
    "apex": Scaled,
    "lightning": Lightning,
    "both": lambda optimizer: Lightning(Through(optimizer)),
}


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_optimizer_is_counted_and_left_alone(name: str, has_state: bool) -> None:
    model = _model()
    optimizer = _adam(model)
    if has_state:
        optimizer.step()
    wrapped = WRAPPERS[name](optimizer)
    before = _facts(optimizer, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _bytes(model, wrapped) == sum(2 * p.numel() * 4 + 4 for p in model.parameters())
    assert _facts(optimizer, model) == before
    assert bare(wrapped) is optimizer
    assert len(optimizer_tensors(wrapped)) == (12 if has_state else 0)


INSIDE: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "optimizer": lambda optimizer: optimizer,
    "method": lambda optimizer: optimizer.step,
    "object": Holder,
}


@pytest.mark.parametrize("name", INSIDE)
def test_an_optimizer_that_would_step_another_is_not_tried(name: str) -> None:
    model = _model()
    optimizer = _adam(model)
    outer = Lookahead(optimizer, INSIDE[name])
    before = _facts(optimizer, model)
    with pytest.warns(UserWarning, match=r"^Lookahead cannot step without values \(TypeError\): only the state"):
        assert _bytes(model, outer) == 0
    assert _facts(optimizer, model) == before
    optimizer.step()
    assert _facts(optimizer, model) != before


def test_slots_and_shared_objects_are_put_back() -> None:
    model = _model()
    optimizer = Slots(model.parameters())
    before = _facts(optimizer, model)
    assert _bytes(model, optimizer) == sum(p.numel() * 4 for p in model.parameters())
    assert _facts(optimizer, model) == before
    assert (optimizer.number, optimizer.lengths, optimizer.holder.one) == (0, [], None)


def test_schedulers_and_step_hooks_hear_nothing() -> None:
    model = _model()
    HEARD.clear()  # a global, which nothing puts back
    optimizer = _adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: HEARD.append("own"))
    everywhere = register_optimizer_step_post_hook(lambda *_: HEARD.append("all"))
    try:
        before = _facts(optimizer, model)
        _bytes(model, optimizer)
    finally:
        everywhere.remove()
    assert (HEARD, _facts(optimizer, model)) == ([], before)
    assert scheduler.get_last_lr() == [0.1]


@pytest.mark.parametrize("call", ["optimize", "apply", "plan", "observe", "follow"])
def test_what_is_no_optimizer_is_refused(call: str) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4)), (torch.ones(2, 4),)
    calls: dict[str, Callable[[Any], Any]] = {
        "optimize": lambda wrong: lowtide.optimize(model, budget="1GiB", optimizer=wrong),
        "apply": lambda wrong: lowtide.apply(model, {"swap": "none"}, optimizer=wrong),
        "plan": lambda wrong: lowtide.plan(model, batch, budget="1GiB", loss=Tensor.sum, optimizer=wrong),
        "observe": lambda wrong: lowtide.observe(model, batch, loss=Tensor.sum, optimizer=wrong),
        "follow": lambda wrong: lowtide.apply(model, {"recompute_config": {"recompute": False}}, optimizer=wrong),
    }
    name = {"observe": "observe", "follow": "lowtide.apply"}.get(call, f"lowtide.{call}")
    with pytest.raises(lowtide.ConfigError) as caught:
        calls[call]([torch.optim.SGD(model.parameters())])
    assert str(caught.value) == (f"{name}: optimizer= takes a torch.optim.Optimizer, or a wrapper around one, not list")
    assert "forward" not in vars(model)
