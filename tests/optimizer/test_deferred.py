"""Updates that wait for the next forward pass: same bits, whatever happens in between, and words where it cannot be."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_zoo import Counted, assert_same, assert_same_value, result_of, swapped
from torch import Tensor, nn

import lowtide
from lowtide.engines.virtual import VirtualEngine
from lowtide.errors import ConfigError


class Tower(nn.Module):
    """Tied weights, a layer left out in turn, a weight that is read by hand before its module is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.head = nn.Linear(24, 24, bias=False)
        self.head.weight = self.layers[0].weight
        self.late = nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = x + self.late.weight.sum(0) * self.scale
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x).tanh()
        return self.late(self.head(x))


def _make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "lr": 3e-2}]
    if kind == "Counted":
        return Counted(groups)
    if kind == "tensor lr":
        return torch.optim.Adam(groups[1]["params"], lr=torch.tensor(0.01), foreach=False)
    return torch.optim.AdamW(groups, lr=1e-2, fused=kind == "fused")


def _train(engine: Any, kind: str = "AdamW", accumulate: int = 1, zero: bool = True, each: Any = None) -> Any:
    torch.manual_seed(3)
    model = Tower()
    optimizer = _make(kind, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    handle = swapped(optimizer, engine, overlap="deferred", model=model) if engine else None
    losses, waited = [], []
    for step in range(7):
        for micro in range(accumulate):
            x = torch.full((3, 24), 0.1 * (step + micro))
            with torch.autocast("cpu", torch.bfloat16, enabled=step == 5):
                loss = model(x, skip=step % 5 + 1).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if handle:
            run = handle._deferred._run
            waited.append(len(run.todo) if run else 0)
        if zero:
            optimizer.zero_grad()
        scheduler.step()
        if each:
            each(model, optimizer, handle, step)
    if handle:
        handle.flush()
    result = result_of(list(model.parameters()), optimizer), losses
    if handle:
        handle.detach()
        assert engine.violations == []
        assert engine.num_slots == 0
        assert waited[0] == 0, "the state is made in the first step"
        assert all(waited[1:])
        assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())
    return result


def _assert_same(one: Any, other: Any) -> None:
    assert_same(one[0], other[0])
    assert_same_value(one[1], other[1], "losses")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "fused", "Counted", "tensor lr"])
def test_same_bits(kind: str, accumulate: int) -> None:
    truth = _train(None, kind, accumulate)
    for seed in range(3):
        _assert_same(_train(VirtualEngine(seed), kind, accumulate), truth)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(10, 60))
def test_same_bits_under_many_schedules(seed: int) -> None:
    for kind in ("AdamW", "Counted"):
        _assert_same(_train(VirtualEngine(seed), kind), _train(None, kind))


def test_gradients_that_are_kept_go_on_accumulating() -> None:
    _assert_same(_train(VirtualEngine(0), zero=False), _train(None, zero=False))


def test_whoever_looks_sees_the_step_done() -> None:
    seen: list[list[Any]] = [[], []]

    def look(number: int) -> Any:
        def each(model: nn.Module, optimizer: Any, handle: Any, step: int) -> None:
            if step == 2:
                seen[number].append(copy.deepcopy(model.state_dict()))
            if step == 3:
                seen[number].append(copy.deepcopy(optimizer.state_dict()["state"]))
            if step == 4:
                seen[number].append(copy.deepcopy(model.layers[2].state_dict()))
            if step == 5:
                seen[number].append(copy.deepcopy(dict(optimizer.state[model.layers[1].weight])))

        return each

    _assert_same(_train(VirtualEngine(0), each=look(1)), _train(None, each=look(0)))
    assert_same_value(seen[1], seen[0], "seen")


class Reader(Tower):
    """From some step on it reads parameters by hand, through references of its own, before their modules are called."""

    def __init__(self) -> None:
        super().__init__()
        self.held = ([self.layers[4].weight], {"bias": self.layers[5].bias})
        self.calls = 0

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        self.calls += 1
        if self.calls > 3:
            norms = torch._foreach_norm([*self.held[0], self.held[1]["bias"]])
            x = x + torch.stack([norm.detach() for norm in norms]).sum()
        if self.calls > 5:
            x = x + torch.nn.functional.linear(x, weight=self.layers[3].weight.detach())
        return super().forward(x, skip)


class Doubling(torch.overrides.TorchFunctionMode):
    """Of the user's, around the forward pass: the optimizer's own products are none of its business."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.Tensor.mul_, torch.Tensor.lerp_, torch.Tensor.tanh) else result


def test_parameters_that_are_read_by_hand_are_up_to_date_whenever_that_begins() -> None:
    results: list[Any] = []
    for engine in (None, VirtualEngine(0)):
        torch.manual_seed(3)
        model = Reader()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        handle = swapped(optimizer, engine, overlap="deferred", model=model) if engine else None
        losses = []
        for step in range(9):
            with Doubling():
                loss = model(torch.full((3, 24), 0.1 * step), skip=2 if step % 2 else -1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step == 6:
                with torch.no_grad():
                    losses.append(model(torch.ones(2, 24)))
            if step == 7:
                losses.append(model.layers[1](torch.ones(1, 24)).detach())  # past the model's own call
        if handle:
            handle.flush()
        results.append((result_of(list(model.parameters()), optimizer), losses))
        if handle:
            handle.detach()
            assert torch.overrides._get_current_function_mode_stack() == []
    _assert_same(results[1], results[0])


def test_a_forward_pass_that_fails_leaves_no_mode_and_no_old_parameter() -> None:
    results = []
    for engine in (None, VirtualEngine(1)):
        torch.manual_seed(3)
        model = Tower()
        optimizer = _make("AdamW", model)
        handle = swapped(optimizer, engine, overlap="deferred", model=model) if engine else None
        for step in range(5):
            model(torch.ones(3, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for error in (RuntimeError, KeyboardInterrupt) if step == 3 else ():
                hook = model.layers[2].register_forward_hook(lambda *_, error=error: (_ for _ in ()).throw(error("no")))
                with pytest.raises(error):
                    model(torch.ones(3, 24))
                hook.remove()
        if handle:
            handle.flush()
        results.append((result_of(list(model.parameters()), optimizer), []))
        if handle:
            handle.detach()
        assert torch.overrides._get_current_function_mode_stack() == []
    _assert_same(results[1], results[0])


def test_buckets_that_come_ahead_take_no_more_than_their_places() -> None:
    """Also where the forward pass runs its modules in another order than the optimizer has them."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
    model.forward = lambda x, order: [x := model[number](x).tanh() for number in order][-1]  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bucket = 2 * 64 * 64 * 4
    handle = lowtide.swap_optimizer(
        optimizer, overlap="deferred", model=model, engine=VirtualEngine(5), bucket_bytes=bucket, resident=0.0
    )
    for order in ((0, 1, 2, 3, 4, 5, 6, 7), (7, 6, 5, 4, 3, 2, 1, 0), (3, 0, 7, 1, 5), (6, 6, 2), (0, 4, 1)):
        model(torch.ones(2, 64), order).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.stats.bucket_peak_bytes == 3 * bucket
    handle.detach()


def _halve(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


def _replace(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 0.5


_WRITES: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], None], str]] = {
    "zero_grad": (
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        "gradients were written to before the deferred update that needs them; use zero_grad(set_to_none=True), or "
        "call handle.flush() first",
    ),
    "last gradient": (
        lambda model, optimizer: _halve(list(model.parameters())[-1].grad),
        "gradients were written to before the deferred update that needs them; use zero_grad(set_to_none=True), or "
        "call handle.flush() first",
    ),
    "parameter": (
        lambda model, optimizer: _halve(list(model.parameters())[-1]),
        "parameters were written to before the deferred update of them; call handle.flush() first",
    ),
    "data": (
        lambda model, optimizer: _replace(list(model.parameters())[-1]),
        "parameters were written to before the deferred update of them; call handle.flush() first",
    ),
}


@pytest.mark.parametrize("name", _WRITES)
def test_what_is_written_to_before_its_update_is_refused_and_a_checkpoint_mends_it(name: str) -> None:
    """Nobody could do such a step to the bits of plain; and nobody is left with an optimizer that does nothing more."""
    write, words = _WRITES[name]
    torch.manual_seed(0)
    model = Tower()
    optimizer = _make("AdamW", model)
    handle = swapped(optimizer, VirtualEngine(0), overlap="deferred", model=model)

    def step() -> None:
        model(torch.ones(3, 24)).sum().backward()
        optimizer.step()

    for _ in range(2):
        step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step()
    peak_bytes = handle.stats.bucket_peak_bytes
    write(model, optimizer)
    full = f"lowtide: {words}. This step cannot be done any more: load a checkpoint"
    with pytest.raises(RuntimeError, match=f"^{re.escape(full)}$"):
        model(torch.ones(3, 24))
    with pytest.raises(RuntimeError, match=r"^lowtide: step: the last step stopped half-way .* load a checkpoint$"):
        optimizer.step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    optimizer.zero_grad()
    for _ in range(2):
        step()
        optimizer.zero_grad()
    assert handle.stats.bucket_peak_bytes == peak_bytes
    handle.detach()
    truth = Tower()
    plain = _make("AdamW", truth)
    truth.load_state_dict(saved[0])
    plain.load_state_dict(saved[1])
    for _ in range(2):
        truth(torch.ones(3, 24)).sum().backward()
        plain.step()
        plain.zero_grad()
    _assert_same((result_of(list(model.parameters()), optimizer), []), (result_of(list(truth.parameters()), plain), []))


def test_after_a_write_that_is_refused_the_swap_can_be_taken_off() -> None:
    torch.manual_seed(0)
    model = Tower()
    optimizer = _make("AdamW", model)
    engine = VirtualEngine(0)
    handle = swapped(optimizer, engine, overlap="deferred", model=model)
    for _ in range(2):
        model(torch.ones(3, 24)).sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"^lowtide: gradients were written to"):
        handle.detach()
    handle.detach()
    assert engine.num_slots == 0
    assert "step" not in vars(optimizer)


def test_parameters_that_are_parts_of_one_tensor_are_not_taken_for_written_to() -> None:
    """torch counts versions of a tensor and its views together: another optimizer's step counts for these too."""
    flat = torch.linspace(-1, 1, 2 * 24 * 24)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    for number, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[number * 576 : (number + 1) * 576].view(24, 24))
    optimizer = torch.optim.AdamW(model[0].parameters())
    other = torch.optim.SGD(model[1].parameters(), lr=0.1)
    handle = swapped(optimizer, VirtualEngine(0), overlap="deferred", model=model)
    for _ in range(3):
        model(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    assert handle.stats.num_steps == 3
    handle.detach()


def test_a_grad_scaler_that_leaves_infs_to_the_optimizer_defers_nothing() -> None:
    results = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model = Tower()
        optimizer = _make("fused", model)
        handle = None
        if is_swapped:
            handle = swapped(optimizer, VirtualEngine(0), overlap="deferred", model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(5):
            scaler.scale(model(torch.full((3, 24), float("inf") if step == 2 else 0.1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(result_of(list(model.parameters()), optimizer))
        if handle:
            handle.detach()
    assert_same(results[1], results[0])


def test_refusals() -> None:
    model = Tower()
    optimizer = _make("AdamW", model)
    with pytest.raises(ConfigError) as caught:
        lowtide.swap_optimizer(optimizer, engine="virtual:0", overlap="deferred")
    assert str(caught.value) == (
        "lowtide.swap_optimizer: overlap 'deferred' follows the modules of a model; give it as model="
    )
    model.compile(backend="eager")
    with pytest.raises(ConfigError) as caught:
        lowtide.swap_optimizer(optimizer, engine="virtual:0", overlap="deferred", model=model)
    assert str(caught.value) == (
        "lowtide.swap_optimizer: overlap 'deferred' does not go with a compiled model; use 'backward'"
    )
    assert "lowtide_swap" not in vars(optimizer)
