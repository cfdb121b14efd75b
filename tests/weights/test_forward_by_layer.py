"""Forwards of several micro-batches layer by layer: plain's bits, one fetch for all; else in order, and a line
that says why."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import queue
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.errors import ConfigError
from tests.support.virtual_engine import VirtualEngine
from tests.weights.test_bit_equality import Block, Small, assert_same
from tests.weights.test_micro_batches import _checkpointed, _of, _one_by_one, batch

Around = Callable[[], contextlib.AbstractContextManager[Any]]


class _Remembers(Block):
    """Leaves a number for whoever sums up at the end of the forward, as routers of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        self.aux = made.square().mean()
        return made


class _SumsUp(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Remembers(24) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + sum(layer.aux.detach() for layer in self.layers)


class _Masked(Small):
    """What each layer reads is set ahead of the layers and taken away after them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda module, args: (args[0] * module.scale,))
        self._set(None)

    def _set(self, scale: Any) -> None:
        for layer in self.layers:
            layer.scale = scale  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self._set(tokens.float().mean() / 8)
        try:
            return super().forward(tokens)
        finally:
            self._set(None)


class _Counts(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return super().forward(x * self.number.item())


class _Normed(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(x.transpose(1, 2)).transpose(1, 2))


class _Dropped(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(super().forward(x), 0.3, True)


_LOCAL = threading.local()
_SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
_SEEN = {"number": 0}


class _ReadsThread(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * getattr(_LOCAL, "scale", 1.0))


class _WritesContext(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _SCALE.set(_SCALE.get() * 1.01)
        return super().forward(x * _SCALE.get())


class _WritesGlobal(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _SEEN["number"] += 1
        return super().forward(x * (1 + _SEEN["number"] / 100))


class _Attends(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.scaled_dot_product_attention(x, x, x))


class _CastsTwice(Block):
    """A weight that two regions of autocast cast each by themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.up(self.norm(x))[..., :24]
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x.float())


class _CastsInTurn(Small):
    """Some micro-batches to one dtype, some to another."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", (torch.bfloat16, torch.float16)[int(tokens.sum()) % 2]):
            return super().forward(tokens)


class _Towers(nn.Module):
    """Two towers and one weight behind both, whose cast plain autocast makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Embedding(32, 24), Block(24)) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(8, 24))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        one, other = (nn.functional.linear(tower(tokens), self.weight) for tower in self.towers)
        return (one * other).float().mean()


@contextlib.contextmanager
def _thread_scale() -> Any:
    _LOCAL.scale = 1.5
    yield
    del _LOCAL.scale


def _cast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def _math() -> contextlib.AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


class Trained:
    """What some steps leave, in `left`; and the handle."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        *,
        number: int = 3,
        handed_over: bool,
        num_steps: int = 4,
        around: Around = contextlib.nullcontext,
        inside: Around = contextlib.nullcontext,
        engine: Any = None,
        update: str = "step",
    ) -> None:
        torch.manual_seed(1)
        self.model = model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _SEEN["number"], self.left, self.handle = 0, {}, None

        def loss_of(seed: int) -> torch.Tensor:
            with inside():
                loss = model(batch(seed))
            return loss.float() / number

        step_of: Any = _one_by_one
        if handed_over:
            self.handle = lowtide.swap_weights(model, optimizer, min_bytes=1, engine=engine, update=update)
            step_of = self.handle.step
        torch.manual_seed(2)
        with contextlib.ExitStack() as stack:
            stack.callback(self.handle.remove if self.handle is not None else lambda: None)
            for step in range(num_steps):
                with around():
                    losses = step_of([lambda n=n: loss_of(n) for n in range(10 * step, 10 * step + number)])
                self.left |= {f"loss {step}.{n}": loss for n, loss in enumerate(losses)}
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                self.left |= {f"gradient {step} {n}": g for n, g in gradients.items()}
                optimizer.step()
                optimizer.zero_grad()
        self.left |= {name: value.clone() for name, value in model.state_dict().items()}


def _same(**how: Any) -> Trained:
    found, plain = (contextvars.copy_context().run(Trained, handed_over=each, **how) for each in (True, False))
    assert_same(found.left, plain.left, gradients=how.get("update") != "in_backward")
    return found


def _checkpointed_model() -> nn.Module:
    model = Small()
    _checkpointed(model)
    return model.eval()


BY_LAYER: dict[str, dict[str, Any]] = {
    "plain": {"make": Small},
    "in backward": {"make": Small, "update": "in_backward"},
    "checkpointed": {"make": _checkpointed_model},
    "autocast around": {"make": Small, "around": _cast},
    "autocast inside": {"make": Small, "inside": _cast},
    "casts twice": {"make": lambda: _of(_CastsTwice)},
    "casts to two types": {"make": _CastsInTurn, "number": 6},
    "attention's kernels around": {"make": lambda: _of(_Attends), "around": _math},
}


@pytest.mark.parametrize("name", BY_LAYER)
def test_by_layer_has_the_bits_of_plain(name: str) -> None:
    found = _same(**BY_LAYER[name])
    assert found.handle._forwards.is_by_layer


@pytest.mark.parametrize("seed", range(3))
def test_by_layer_on_an_adversarial_engine(seed: int) -> None:
    engine = VirtualEngine(seed)
    _same(make=Small, engine=engine, update=("step", "in_backward")[seed % 2])
    assert not engine.violations, engine.violations


IN_ORDER: dict[str, tuple[dict[str, Any], str]] = {
    "shares a cast": ({"make": _Towers, "inside": _cast}, "the cast of 'weight' twice around layers"),
    "sums up": ({"make": _SumsUp}, "'layers.0.aux'"),
    "masked": ({"make": _Masked}, "'layers.0.scale'"),
    "counts": ({"make": lambda: _of(_Counts)}, "'layers.0.number'"),
    "statistics": ({"make": lambda: _of(_Normed)}, "'layers.0.statistics."),
    "dropout": ({"make": lambda: _of(_Dropped)}, "torch's random state"),
    "thread": ({"make": lambda: _of(_ReadsThread), "around": _thread_scale}, "'"),
    "context": ({"make": lambda: _of(_WritesContext)}, "a context variable"),
    "global": ({"make": lambda: _of(_WritesGlobal)}, "'"),
    "kernels inside": ({"make": lambda: _of(_Attends), "inside": _math}, "a setting of torch"),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_forwards_leave_for_each_other_keeps_them_in_order(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Right to the bit, and a line says why a layer is fetched for each forward."""
    how, text = IN_ORDER[name]
    with caplog.at_level(logging.INFO, "lowtide"):
        found = _same(**how)
    lines = [
        record.getMessage() for record in caplog.records if "lowtide: step: forwards run one" in record.getMessage()
    ]
    assert len(lines) == 1 and text in lines[0], lines
    assert not found.handle._forwards.is_by_layer


def test_a_cast_that_is_shared_later_is_refused() -> None:
    """Of autocast that is switched on after the first look."""
    torch.manual_seed(1)
    model = _Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with lowtide.swap_weights(model, optimizer, min_bytes=1) as handle:
        handle.step([lambda n=n: model(batch(n)) for n in range(2)])
        optimizer.zero_grad()
        with (
            _cast(),
            pytest.raises(ConfigError, match=r"changes the cast of 'weight' \(used twice around layers\), and"),
        ):
            handle.step([lambda n=n: model(batch(n)) for n in range(2)])
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_leaves_something_later_is_refused() -> None:
    """By name, before any gradient is there; the step after it goes one after the other, with plain's bits."""
    torch.manual_seed(1)
    model, plain = Small(), Small()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain)]
    with lowtide.swap_weights(model, optimizers[0], min_bytes=1) as handle:

        def both(seed: int) -> None:
            handle.step([lambda n=n: model(batch(n)) for n in (seed, seed + 1)])
            _one_by_one([lambda n=n: plain(batch(n)) for n in (seed, seed + 1)])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        both(0)
        both(2)
        hook = model.layers[2].register_forward_hook(lambda module, *_: setattr(module, "seen", object()))
        with pytest.raises(ConfigError) as refused:
            handle.step([lambda n=n: model(batch(n)) for n in (4, 5)])
        assert str(refused.value) == (
            "lowtide: step: the forward of a micro-batch changes 'layers.2.seen', and forwards of others run in "
            "between, so this step is not right: no gradient was touched; call step again, and forwards will run one "
            "after the other"
        )
        assert all(parameter.grad is None for parameter in model.parameters())
        both(4)
        hook.remove()
        both(6)
    assert_same({**model.state_dict()}, {**plain.state_dict()})


def turns() -> list[threading.Thread]:
    """Threads on which forwards run."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("lowtide-forward")]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_error_in_any_forward_ends_all(kind: type[BaseException], which: int) -> None:
    """No thread and no activation is left, and the next step is plain's."""
    made: queue.SimpleQueue[weakref.ref[torch.Tensor]] = queue.SimpleQueue()  # a list would be seen to grow
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss_of(number: int, fails: bool) -> torch.Tensor:
        made.put(weakref.ref(x := model.embed(batch(number))))
        for layer in model.layers:
            made.put(weakref.ref(x := layer(x)))
            if fails and number == which and layer is model.layers[2]:
                raise kind
        return model.head(x).square().mean()

    with lowtide.swap_weights(model, optimizer, min_bytes=1) as handle:
        handle.step([lambda n=n: loss_of(n, False) for n in range(3)])
        while not made.empty():
            made.get()
        assert handle._forwards.is_by_layer
        with pytest.raises(kind):
            handle.step([lambda n=n: loss_of(n, True) for n in range(3)])
        gc.collect()
        assert not turns()
        assert made.qsize() > 9 and not any(made.get()() is not None for _ in range(made.qsize()))
        optimizer.zero_grad()
        handle.step([lambda n=n: loss_of(n, False) for n in range(3)])
        found = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
    _one_by_one([lambda n=n: loss_of(n, False) for n in range(3)])
    assert all(map(torch.equal, found, (parameter.grad for parameter in model.parameters())))


@pytest.mark.parametrize("when", [3, 8])
def test_ctrl_c_while_forwards_take_turns(when: int) -> None:
    """The main thread gets it while a layer runs on another one. How many layers have begun decides when, not a
    clock: a late one would end whatever runs after this test."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    is_armed = [False]
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()  # a list would be seen to grow

    def interrupt(*_: Any) -> None:
        if is_armed[0]:
            begun.put(None)
            if begun.qsize() == when:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    for layer in model.layers:
        layer.register_forward_pre_hook(interrupt)
    with lowtide.swap_weights(model, optimizer, min_bytes=1) as handle:
        losses = [lambda n=n: model(batch(n)) for n in range(3)]
        handle.step(losses)
        optimizer.zero_grad()
        assert handle._forwards.is_by_layer
        is_armed[0] = True
        with pytest.raises(KeyboardInterrupt):
            handle.step(losses)
        assert not turns()
        is_armed[0] = False
        optimizer.zero_grad()
        handle.step(losses)
        found = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
    _one_by_one(losses)
    assert all(map(torch.equal, found, (parameter.grad for parameter in model.parameters())))
