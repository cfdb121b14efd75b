"""Micro-batches that share one stay of a layer's weights in backward: plain's bits, two fetches, refusals by name."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import types
import weakref
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import ConfigError
from tests.attack.draw import any_draw, seed_all
from tests.attack.models import batch_of, build
from tests.attack.models import loss_of as loss_of_output
from tests.support import zoo
from tests.support.grid import in_turn, one_of
from tests.support.virtual_engine import VirtualEngine
from tests.weights.test_bit_equality import OPTIMIZERS, Block, Small, assert_same, weights_and_state

Change = Callable[[nn.Module], None]


def batch(number: int) -> torch.Tensor:
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(number))


def train(
    swap: Callable[[nn.Module, Any], Any] | None,
    num_micro_batches: int,
    *,
    kind: str = "adamw",
    change: Change = lambda model: None,
    clip: float | None = None,
    num_steps: int = 3,
) -> dict[str, torch.Tensor]:
    """Everything that some steps leave, by name; plain without `swap`."""
    torch.manual_seed(1)
    model = Small()
    change(model)
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    handle = None if swap is None else swap(model, optimizer)
    left = {}
    torch.manual_seed(2)
    for step in range(num_steps):
        optimizer.zero_grad()
        numbers = range(step * 10, step * 10 + num_micro_batches)
        if handle is None:
            losses = []
            for number in numbers:
                losses.append(model(batch(number)) / num_micro_batches)
                losses[-1].backward()
        else:
            losses = handle.step([lambda n=n: model(batch(n)) / num_micro_batches for n in numbers])
        left |= {f"loss {step}.{number}": loss.detach().clone() for number, loss in enumerate(losses)}
        if clip is not None:
            left[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        left |= {f"gradient {step} {name}": gradient.clone() for name, gradient in gradients.items()}
        optimizer.step()
    if handle is not None:
        handle.remove()
    return left | weights_and_state(model, optimizer)


plain = functools.cache(functools.partial(train, None))
"""Training without lowtide, remembered."""


def swapped(update: str, engine: Any = None) -> Callable[[nn.Module, Any], Any]:
    return lambda model, optimizer: lowtide.swap_weights(model, optimizer, update=update, min_bytes=1, engine=engine)


def _drops(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda module, args, output: torch.dropout(output, 0.3, True))


def _drops_inside(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.norm = nn.Sequential(layer.norm, nn.Dropout(0.3))


def _checkpointed(model: nn.Module) -> None:
    _drops_inside(model)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.__class__ = _CheckpointedBlock


class _CheckpointedBlock(Block):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def _frozen(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" not in name and "embed" not in name)


def _hooked(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.up.weight.register_hook(lambda gradient: gradient * 2)
        layer.register_full_backward_hook(lambda module, given, made: (given[0] * 3,))


def _writes(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda module, args, output: output.mul_(1.5))
        layer.register_forward_pre_hook(lambda module, args: (args[0].add_(0.5),))


CHANGES: dict[str, Change] = {
    "plain": lambda model: None,
    "dropout around layers": _drops,
    "dropout inside": _drops_inside,
    "checkpointed": _checkpointed,
    "frozen": _frozen,
    "hooked": _hooked,
    "writes in place": _writes,
}


@pytest.mark.parametrize(("name", "update"), in_turn(2, CHANGES, ["step", "in_backward"]))
def test_the_bits_of_plain(name: str, update: str) -> None:
    """One micro-batch after the other is plain's order of sums; all forwards first is the order of random numbers. A
    single one is part of what three do."""
    for number in (1, 3) if name in ("plain", "checkpointed") else (3,):
        found = train(swapped(update), number, change=CHANGES[name])
        assert_same(found, plain(number, change=CHANGES[name]), gradients=update == "step")


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_clipping(kind: str) -> None:
    assert_same(train(swapped("step"), 4, kind=kind, clip=0.1), plain(4, kind=kind, clip=0.1))


@pytest.mark.parametrize(("seed", "update"), in_turn(2, range(4), ["step", "in_backward"]))
def test_on_an_adversarial_engine(seed: int, update: str) -> None:
    engine = VirtualEngine(seed)
    found = train(swapped(update, engine), 3, change=_checkpointed)
    assert not engine.violations, engine.violations
    assert engine.num_slots == 0
    assert_same(found, plain(3, change=_checkpointed), gradients=update == "step")


def _fetched(update: str, *, together: bool) -> float:
    """By forward and backward of four micro-batches: weights and gradients, as multiples of the weights. There is room
    for two layers at a time, so that each comes for each use."""
    torch.manual_seed(1)
    model = Small(num_layers=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lowtide.swap_weights(model, optimizer, update=update, min_bytes=1, bucket_bytes=4096) as handle:
        for _ in range(3):
            before = handle.stats.fetched_bytes
            losses = [functools.partial(lambda n: model(batch(n)), number) for number in range(4)]
            if together:
                handle.step(losses)
            else:
                for loss in losses:
                    loss().backward()
            fetched = handle.stats.fetched_bytes - before
            optimizer.step()
            optimizer.zero_grad()
        stats = handle.stats
    assert stats.peak_bytes <= stats.window_bytes
    return fetched / stats.swapped_bytes


def test_a_layer_is_fetched_once_for_all_forwards_and_once_for_all_backwards() -> None:
    """Twice for eight times, less what is there at the turn from forward to backward; and what was added to a gradient
    needs not come back for the next micro-batch."""
    alone, together = _fetched("step", together=False), _fetched("step", together=True)
    in_backward = _fetched("in_backward", together=True)
    print(alone, together, in_backward)
    assert alone > 9.0
    assert 1.5 < together < 2.1
    assert 1.5 < in_backward < 2.1


def _ties(model: nn.Module) -> None:
    model.head.weight = model.embed.weight  # type: ignore[union-attr, assignment]


class _Around(Small):
    """A sum that goes around the layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x + first).flatten(0, 1), tokens.flatten())


class _Twice(Small):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class _Leaks(Small):
    """What a layer has made inside is used outside of it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inside: list[torch.Tensor] = []
        handle = self.layers[1].up.register_forward_hook(lambda module, args, output: inside.append(output))  # type: ignore[union-attr]
        loss = super().forward(tokens)
        handle.remove()
        return loss + inside[0].square().mean()


class _Remembers(Small):
    """What the last micro-batch has made goes into the next one."""

    last: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        made, self.last = x if self.last is None else x + self.last, x
        return torch.nn.functional.cross_entropy(self.head(made).flatten(0, 1), tokens.flatten())


class _WritesLater(Small):
    """A layer gives a view, and what it is a view of is written to after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = _Half()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(tokens))
        self.layers[0].whole.mul_(2.0)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.whole = self.up(x)
        return self.whole[..., :24]


class _RemembersMore(Small):
    """The same, through an operator that both micro-batches have above what a layer gave."""

    last: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = x * 0.5
        made, self.last = x if self.last is None else x + self.last, x
        return torch.nn.functional.cross_entropy(self.head(made).flatten(0, 1), tokens.flatten())


class _Searches(Small):
    """A backward pass inside of the forward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        loss.backward(retain_graph=True)
        return loss


class _TakesMore(Block):
    """A layer that is given a collection too, and writes into it."""

    def forward(self, x: torch.Tensor, more: Any) -> torch.Tensor:
        made = super().forward(x)
        if isinstance(more, list):
            more.append(made.square().mean())
        else:
            more["scale"] = more.get("scale", 0.0) + made.detach().abs().mean().item()
        return made


class _Collects(Small):
    """Layers leave numbers, or parts of the loss, in a collection of the caller."""

    def __init__(self, collection: type) -> None:
        super().__init__()
        self.collection = collection
        self.layers = nn.ModuleList(_TakesMore(24) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, more = self.embed(tokens), self.collection()
        for layer in self.layers:
            x = layer(x, more)
        loss = torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        return loss + (sum(more) if isinstance(more, list) else more["scale"] * loss)


def _of(block: type[Block]) -> Small:
    model = Small()
    model.layers = nn.ModuleList(block(24) for _ in range(4))
    return model


class _Norms(Block):
    """Statistics of batches, in a layer that is computed again."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._compute, x, use_reentrant=False)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(x.transpose(1, 2)).transpose(1, 2))


class _WritesData(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.mul_(0.9)
        return super().forward(x)


class _Boxes(Small):
    """Layers pass on an object in which nobody sees a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Boxed(24) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        box = types.SimpleNamespace(x=self.embed(tokens))
        for layer in self.layers:
            box = layer(box)
        return torch.nn.functional.cross_entropy(self.head(box.x).flatten(0, 1), tokens.flatten())


class _Boxed(Block):
    def forward(self, box: Any) -> Any:
        return types.SimpleNamespace(x=super().forward(box.x))


class _Reentrant(Block):
    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=True)


class _ReentrantInside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


_ALONE = "call backward() of one micro-batch after the other instead"
_SUMS = f", so gradients would not be added up as in plain training; {_ALONE}"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (
        Small,
        f"'embed.weight' is used by 'embed' of micro-batch 1 and by 'head' of micro-batch 1{_SUMS}",
    ),
    "around": (
        _Around,
        "what a layer gives, of shape [2, 8, 24], is used by 'layers.0' of micro-batch 1 and by 'head' of micro-batch "
        f"1{_SUMS}",
    ),
    "twice": (_Twice, f"'layers.0' runs more than once in a forward; {_ALONE}"),
    "leaks": (
        _Leaks,
        "the result of View is used by what follows the layers of micro-batch 1 and by 'layers.1' of micro-batch "
        f"1{_SUMS}",
    ),
    "remembers": (
        _Remembers,
        "what a layer gives, of shape [2, 8, 24], is used by 'head' of micro-batch 1 and by 'head' of micro-batch "
        f"2{_SUMS}",
    ),
    "remembers more": (
        _RemembersMore,
        "what a layer gives, of shape [2, 8, 24], is used by 'head' of micro-batch 1 and by 'head' of micro-batch "
        f"2{_SUMS}",
    ),
    "collects": (
        lambda: _Collects(list),
        f"the result of Add is used by what follows the layers of micro-batch 1 and by 'layers.0' of micro-batch "
        f"1{_SUMS}",
    ),
    "reentrant": (
        lambda: _of(_Reentrant),
        "a reentrant checkpoint is around layers, whose graphs are made in backward only; give it use_reentrant=False, "
        f"or {_ALONE}",
    ),
    "searches": (_Searches, f"a micro-batch has a backward pass inside of its forward; {_ALONE}"),
    "boxes": (
        _Boxes,
        "'layers.0.norm.weight' is used by 'head', and it is there for 'layers.0', all of whose results "
        f"must be tensors, or tuples, lists or dicts of them; {_ALONE}",
    ),
    "writes later": (
        _WritesLater,
        f"what 'layers.0' gave was written into through another tensor; {_ALONE}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_sums_are_refused_before_any_gradient_is_there(name: str) -> None:
    make, text = REFUSED[name]
    model = make()
    if name == "tied":
        _ties(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with lowtide.swap_weights(model, optimizer, min_bytes=1) as handle:
        with pytest.raises(ConfigError) as refused:
            handle.step([lambda: model(batch(0)), lambda: model(batch(1))])
        assert str(refused.value) == f"lowtide: step: {text}"
        assert all(parameter.grad is None for parameter in model.parameters())
        model(batch(0)).backward()
        optimizer.step()


def _noisy(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.up.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))


def _draws(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.up.weight.register_hook(lambda gradient: gradient * random.random())


def _after(
    make: Callable[[], nn.Module],
    number: int,
    handed_over: bool,
    change: Change = lambda model: None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, torch.Tensor]:
    """What two steps leave, of a model that is swapped and whose micro-batches are handed over together, or plain."""
    torch.manual_seed(1)
    model = make()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    left = {}
    with contextlib.ExitStack() as stack:
        step_of: Any = _one_by_one
        if handed_over:
            handle = stack.enter_context(lowtide.swap_weights(model, optimizer, min_bytes=1, bucket_bytes=4096))
            step_of = handle.step
        torch.manual_seed(2)
        for step in range(2):
            with around():
                losses = step_of([functools.partial(lambda n: model(batch(n)), 10 * step + n) for n in range(number)])
            left |= {f"loss {step}.{n}": loss for n, loss in enumerate(losses)}
            optimizer.step()
            optimizer.zero_grad()
        if handed_over:
            assert handle.stats.peak_bytes <= handle.stats.window_bytes
    return {**left, **model.state_dict()}


EQUAL: dict[str, dict[str, Any]] = {
    "numbers in a dict": {"make": lambda: _Collects(dict), "number": 3},
    "statistics, one micro-batch": {"make": lambda: _of(_Norms), "number": 1},
    "noise, one micro-batch": {"make": Small, "number": 1, "change": _noisy},
    "data, one micro-batch": {"make": lambda: _of(_WritesData), "number": 1},
    "autocast around": {"make": Small, "number": 3, "around": lambda: torch.autocast("cpu", torch.bfloat16)},
    "reentrant inside": {"make": lambda: _of(_ReentrantInside), "number": 3},
}


@pytest.mark.parametrize("name", EQUAL)
def test_habits_of_layers_and_loops(name: str) -> None:
    """What a cut must not come between: a caller's own collections, a cast that micro-batches share, a window."""
    assert_same(_after(handed_over=True, **EQUAL[name]), _after(handed_over=False, **EQUAL[name]))


_LATER = (
    ", which plain training does before the next micro-batch's forward; this step is not right: call zero_grad() (with "
    "update='in_backward' load a checkpoint, weights were updated), and backward() of one micro-batch after the other"
)
LATE: dict[str, tuple[dict[str, Any], str]] = {
    "statistics": (
        {"make": lambda: _of(_Norms)},
        f"backward of 'layers.3' writes into 'layers.3.statistics.num_batches_tracked'{_LATER}",
    ),
    "noise": ({"make": Small, "change": _noisy}, f"backward of 'layers.3' draws random numbers{_LATER}"),
    "Python's noise": ({"make": Small, "change": _draws}, f"backward of 'layers.3' draws random numbers{_LATER}"),
    "data": (
        {"make": lambda: _of(_WritesData)},
        "'layers.0.up.weight' is written into by the forward of a micro-batch, and those before it had other bytes; "
        f"{_ALONE}",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_backward_and_forwards_do_beside_gradients_is_refused(name: str) -> None:
    """All forwards come before all backward passes here, so what one does to the other would come out otherwise."""
    how, text = LATE[name]
    with pytest.raises(ConfigError) as refused:
        _after(number=3, handed_over=True, **how)
    assert str(refused.value) == f"lowtide: step: {text}"


@pytest.mark.parametrize("where", ["nowhere", "check", "forward", "backward"])
def test_nothing_is_held_after_an_error(where: str) -> None:
    """A loop that tries again with less after an error finds the memory of its activations."""
    made: list[weakref.ref[torch.Tensor]] = []
    model = _Around() if where == "check" else Small()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def stop(*_: Any) -> None:
        raise ValueError

    def second() -> torch.Tensor:
        loss = model(batch(1))
        return stop() if where == "forward" else loss  # type: ignore[return-value]

    if where == "backward":
        model.layers[2].up.weight.register_hook(stop)
    with lowtide.swap_weights(model, optimizer, min_bytes=1) as handle:
        with contextlib.suppress(ConfigError, ValueError):
            handle.step([lambda: model(batch(0)), second])
        torch.zeros((), requires_grad=True).backward()  # torch's own queue keeps nodes of a pass that failed until then
        gc.collect()
        assert len(made) == 8 and [ref() for ref in made] == [None] * 8


def test_losses_from_a_generator() -> None:
    model = Small()
    with lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=1e-2), min_bytes=1) as handle:
        assert len(handle.step(functools.partial(model, batch(n)) for n in range(2))) == 2  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="takes a list of functions, each of which runs the forward of one"):
            handle.step(lambda: model(batch(0)))  # type: ignore[arg-type]


def test_what_is_no_micro_batch_is_refused() -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lowtide.swap_weights(model, optimizer, update="in_backward", min_bytes=1, bucket_bytes=4096) as handle:
        for losses in ([], [model(batch(0))]):
            with pytest.raises(ConfigError, match="takes a list of functions, each of which runs the forward of one"):
                handle.step(losses)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"what loss 2 returns is no scalar tensor with a graph"):
            handle.step([lambda: model(batch(0)), lambda: model(batch(1)).detach()])
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            handle.step([lambda: model(batch(0))])
        with pytest.raises(ConfigError, match=r"backward has updated weights already; call optimizer.step\(\) first"):
            handle.step([lambda: model(batch(0))])
        optimizer.step()
        with lowtide.apply(model, {"swap": "all"}), pytest.raises(ConfigError, match="the model is under a plan"):
            handle.step([lambda: model(batch(0))])


@pytest.mark.parametrize("update", ["step", "in_backward"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_middle(kind: type[BaseException], where: str, update: str) -> None:
    """The step after it is plain's: an error of a forward leaves no gradient, one of backward those that came."""
    torch.manual_seed(1)
    plain, model = Small(), Small()
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, model)]
    with lowtide.swap_weights(model, optimizers[1], update=update, min_bytes=1) as handle:

        def fails(number: int) -> torch.Tensor:
            loss = model(batch(number))
            if number == 1 and where == "forward":
                raise kind
            return loss

        def stops(gradient: torch.Tensor) -> None:
            raise kind

        stop = model.layers[2].up.weight.register_hook(stops) if where == "backward" else None
        with pytest.raises(kind):
            handle.step([lambda: fails(0), lambda: fails(1)])
        if stop is not None:
            stop.remove()
        if where == "forward":
            assert all(parameter.grad is None for parameter in model.parameters())
        optimizers[1].zero_grad()
        for _ in range(2):
            for number in (2, 3):
                plain(batch(number)).backward()
            handle.step([lambda: model(batch(2)), lambda: model(batch(3))])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same({**model.state_dict()}, {**plain.state_dict()})


def _drawn(seed: int, handed_over: bool) -> list[torch.Tensor] | str:
    """What three steps of a model of the attack leave, or why it was refused."""
    drawn, r = any_draw(seed), Random(seed)
    number, update = r.choice((1, 2, 3, 4)), r.choice(("step", "in_backward"))
    seed_all(seed)
    model = build(drawn.model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(batch_seed: int) -> torch.Tensor:
        batch = batch_of(drawn.model, batch_seed)
        labels = {"labels": batch["labels"]} if drawn.model.own_loss else {}
        return loss_of_output(model(batch["x"], **labels), batch["labels"]) / number

    left: list[torch.Tensor] = []
    how: Any = {"update": update, "min_bytes": 1, "bucket_bytes": 4096}
    with contextlib.ExitStack() as stack:
        step_of = _one_by_one
        if handed_over:
            try:
                step_of = stack.enter_context(lowtide.swap_weights(model, optimizer, **how)).step
            except ConfigError as error:
                return str(error)
        seed_all(seed + 1)
        for step in range(3):
            try:
                left += step_of([functools.partial(loss_of, 100 * step + micro) for micro in range(number)])
            except ConfigError as error:
                return str(error)
            if update == "step":
                left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            left += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
            left.append(torch.get_rng_state())
    return left


def _one_by_one(losses: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """As plain training has it."""
    found = []
    for loss_of in losses:
        loss = loss_of()
        loss.backward()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("seed", one_of(20, range(200)))
def test_models_of_the_attack(seed: int) -> None:
    """Layers that write, draw, count, share, checkpoint themselves: plain's bits, or refused by name."""
    found = _drawn(seed, True)
    if isinstance(found, str):
        assert found.startswith(("lowtide: step: ", "lowtide.swap_weights: ")), found
        return
    plain = _drawn(seed, False)
    assert not isinstance(plain, str) and len(found) == len(plain)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one.to_dense().nan_to_num(), other.to_dense().nan_to_num())


def _loss(case: zoo.Case, model: nn.Module, number: int) -> torch.Tensor:
    return case.loss(model, case.batch(number))


@pytest.mark.parametrize("name", one_of(4, sorted(zoo.CASES), first=1))
def test_the_zoo(name: str) -> None:
    """Plain's bits, or a refusal before any gradient is there."""
    case = zoo.CASES[name]
    results = []
    for is_swapped in (False, True):
        model = case.build(3)
        optimizer = zoo.make_optimizer(model)
        torch.manual_seed(5)
        with contextlib.ExitStack() as stack:
            step_of: Any = _one_by_one
            if is_swapped:
                handle = stack.enter_context(lowtide.swap_weights(model, optimizer, min_bytes=1))
                step_of = handle.step
            for numbers in ((0, 1), (2, 3), (4, 5)):
                try:
                    step_of([functools.partial(_loss, case, model, number) for number in numbers])
                except ConfigError as error:
                    print(name, error)
                    assert numbers == (0, 1) and all(parameter.grad is None for parameter in model.parameters())
                    return
                if numbers != (4, 5):
                    optimizer.step()
                    optimizer.zero_grad()
            results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    print(name, "equal", "by layer" if handle._forwards.is_by_layer else "in order")
    assert_same(results[1], results[0])
