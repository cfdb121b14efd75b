"""State and parameters that share memory, and mappings that change hands: plain's bits, or refused by name.

What: random optimizers whose state is shared within a parameter, with its gradient or with the parameter itself; random
pairs of parameters whose state is one memory; parameters that are listed twice; and random sequences of what people do
with `optimizer.state`, after each of which the optimizer must be as a plain one that went the same way.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.errors import ConfigError
from tests.support.optimizer_zoo import Case, assert_same, result_of, swapped
from tests.support.virtual_engine import VirtualEngine
from tests.support.zoo import same_bits

ADAMW = Case("AdamW", "foreach", torch.float32, has_missing=True)
KINDS = [
    Case(kind, implementation, torch.float32, has_missing=False)
    for kind, implementation in (
        ("AdamW", "foreach"),
        ("AdamW", "for-loop"),
        ("SGD", "foreach"),
        ("RMSprop", "foreach"),
    )
]
OVERLAPS = ("step", "backward", "in_backward")

_PARTNERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "own": lambda first, p: torch.zeros_like(p),
    "same": lambda first, p: first,
    "row": lambda first, p: first[:1],
    "flat": lambda first, p: first.view(-1)[1:],
    "parameter": lambda first, p: p.detach(),
    "both in one": lambda first, p: first,
}


class Sharing(torch.optim.Optimizer):
    """Two tensors of state for each parameter that share memory in a way that `draw` chooses, and are both written."""

    def __init__(self, parameters: list[Tensor], draw: int) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.draw = draw

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    how = random.Random(f"{self.draw} {p.shape}").choice(sorted(_PARTNERS))
                    both = torch.zeros(2, *p.shape)
                    state["first"] = both[0] if how == "both in one" else torch.zeros_like(p)
                    state["second"] = both[1] if how == "both in one" else _PARTNERS[how](state["first"], p)
                state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["second"].mul_(0.5).add_(0.25)
                p.sub_(state["first"], alpha=group["lr"])


@pytest.mark.parametrize("resident", [0.0, 0.5])
@pytest.mark.parametrize("draw", range(6))
def test_state_that_is_shared_within_a_parameter_keeps_its_bits_and_stays_shared(draw: int, resident: float) -> None:
    case = Case("AdamW", "foreach", torch.float32, has_missing=bool(draw % 2))
    results, shared = [], []
    for engine in (None, VirtualEngine(draw)):
        parameters, _ = case.build()
        optimizer = Sharing(parameters, draw)  # type: ignore[arg-type]
        handle = swapped(optimizer, engine, resident=resident) if engine else None
        for step in range(8):
            case.set_gradients(parameters, step)
            optimizer.step()
        results.append(result_of(parameters, optimizer))
        if handle is not None:
            assert handle.stats.swapped_bytes > 0 or resident
            handle.detach()
            assert_same(result_of(parameters, optimizer), results[0])
        with torch.no_grad():  # who writes to one of them must be seen in the other
            for state in optimizer.state.values():
                state["second"].fill_(7.0)
        shared.append(result_of(parameters, optimizer))
    assert_same(results[1], results[0])
    assert_same(shared[1], shared[0])


def _share(state: Any, one: Tensor, other: Tensor, draw: random.Random) -> None:
    """Put state of one parameter into the memory of another one's."""
    theirs = [key for key, value in state[one].items() if value.dim()]
    mine = [key for key, value in state[other].items() if value.dim()]
    source = state[one][draw.choice(theirs)].view(-1)
    most = min(source.numel(), other.numel())
    if most == other.numel():
        state[other][draw.choice(mine)] = source[:most].view(other.shape)
    else:
        state[one][draw.choice(theirs)] = state[other][draw.choice(mine)].view(-1)[: one.numel()].view(one.shape)


@pytest.mark.parametrize("draw", range(12))
def test_state_that_two_parameters_share_is_refused(draw: int) -> None:
    choose = random.Random(draw)
    case = KINDS[draw % len(KINDS)]
    parameters, optimizer = case.build()
    case.set_gradients(parameters, 0)
    optimizer.step()
    handle = None
    if draw % 2:
        handle = swapped(optimizer, VirtualEngine(draw), resident=choose.choice((0.0, 0.6)))
    one, other = choose.sample(parameters, 2)
    _share(optimizer.state, one, other, choose)
    case.set_gradients(parameters, 1)
    before = [p.detach().clone() for p in parameters]
    text = "state of two parameters in the same memory"
    if handle is None:
        with pytest.raises(ConfigError, match=text):
            swapped(optimizer, VirtualEngine(draw))
    else:
        with pytest.raises(RuntimeError, match=f"lowtide: step: .*{text}.* or call handle.detach"):
            optimizer.step()
        handle.detach()
    assert all(same_bits(p.detach(), was) for p, was in zip(parameters, before, strict=True))
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("draw", range(9))
def test_a_parameter_that_is_listed_twice_is_refused(draw: int) -> None:
    """torch warns, and steps it twice."""
    choose = random.Random(draw)
    case = KINDS[draw % len(KINDS)]
    parameters, optimizer = case.build()
    twice = choose.choice(parameters)
    handle = swapped(optimizer, VirtualEngine(draw), overlap=choose.choice(("step", "backward"))) if draw % 3 else None
    number = choose.randrange(2)
    optimizer.param_groups[number]["params"].insert(choose.randrange(3), twice)
    is_same_group = any(twice is p for p in (parameters[:3], parameters[3:])[number])
    where = f"twice in param_groups[{number}]" if is_same_group else "in param_groups[0] and in param_groups[1]"
    expected = (
        f"{case.kind} lists a parameter of shape {list(twice.shape)} {where}, and so steps it twice; list it once"
    )
    case.set_gradients(parameters, 0)
    with pytest.raises((ConfigError, RuntimeError)) as caught:
        optimizer.step() if handle else swapped(optimizer, VirtualEngine(draw))
    words = f"lowtide: step: {expected}, or call handle.detach()" if handle else f"lowtide.swap_optimizer: {expected}"
    assert str(caught.value) == words


class Own(defaultdict):
    """A mapping of the user's."""


def _habits(choose: random.Random) -> list[str]:
    words = ("step", "step", "put", "put empty", "load", "own", "share", "detach")
    return [choose.choice(words) for _ in range(14)]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("draw", range(8))
def test_the_mapping_is_the_one_that_a_plain_optimizer_would_have(draw: int, overlap: str) -> None:
    """After `detach`: the object that was there, or that somebody has put there since, with what is in it now; and
    mappings that somebody took out meanwhile are as they were."""
    results: list[list[Any]] = []
    for seed in (None, draw):
        choose = random.Random(draw)
        parameters, optimizer = ADAMW.build()
        engine = VirtualEngine(draw)
        attach = (lambda o=optimizer, e=engine: swapped(o, e, overlap=overlap)) if seed is not None else None
        handle = attach() if attach else None
        mapping: Any = optimizer.state if handle is None else handle._shown.original
        seen: list[Any] = []
        for number, habit in enumerate(_habits(choose)):
            if habit == "step":
                ADAMW.set_gradients(parameters, number)
                optimizer.step()
            elif habit in ("put", "own", "put empty"):
                content = (
                    {}
                    if habit == "put empty"
                    else {p: {k: v.clone() for k, v in entries.items()} for p, entries in optimizer.state.items()}
                )
                mapping = (Own if habit == "own" else defaultdict)(dict, content)
                optimizer.state = mapping
            elif habit == "load":
                saved = {
                    "state": {
                        k: {n: v.clone() for n, v in e.items()} for k, e in optimizer.state_dict()["state"].items()
                    },
                    "param_groups": optimizer.state_dict()["param_groups"],
                }
                optimizer.load_state_dict(saved)
                mapping = None  # torch made one
            elif habit == "share":  # within one parameter
                entries = next((e for e in optimizer.state.values() if e), None)
                if entries is not None:
                    key = choose.choice(("exp_avg_sq", "extra"))
                    entries[key] = (
                        entries["exp_avg"] if choose.random() < 0.5 else entries["exp_avg"].view_as(entries["exp_avg"])
                    )
            if habit == "detach" or number == 13:
                if handle is not None:
                    handle.detach()
                assert mapping is None or optimizer.state is mapping
                assert type(optimizer.state) in (defaultdict, Own)
                if mapping is None:
                    mapping = optimizer.state
                seen.append((type(optimizer.state), result_of(parameters, optimizer)))
                handle = attach() if attach else None
        if handle is not None:
            handle.detach()
        results.append(seen)
    for (kind, result), (plain_kind, truth) in zip(results[1], results[0], strict=True):
        assert kind is plain_kind
        assert_same(result, truth)


def test_a_mapping_that_was_taken_out_is_left_alone() -> None:
    parameters, optimizer = ADAMW.build()
    ADAMW.set_gradients(parameters, 0)
    optimizer.step()
    old = optimizer.state
    handle = swapped(optimizer, VirtualEngine(0))
    optimizer.load_state_dict(optimizer.state_dict())
    handle.detach()
    assert optimizer.state is not old
    optimizer.state.clear()
    assert old
