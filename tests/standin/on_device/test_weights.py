"""Weights that come and go on the stand-in device, with copies that are late, early, or anything between."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError
from tests.standin import device
from tests.standin.swaps import HERE
from tests.support import zoo
from tests.support.grid import in_turn

NAMES = ("llama", "llama_bf16", "mlp", "tied", "lora", "transformer_encoder")


def _on_host(result: zoo.Result) -> zoo.Result:
    return zoo.Result(**{name: {k: v.cpu() for k, v in part.items()} for name, part in vars(result).items()})


def _trained(name: str, plan: dict | None, update: str | None) -> zoo.Result:
    case = zoo.CASES[name]
    model = case.build(3, HERE)
    optimizer = zoo.make_optimizer(model)
    handle = None
    if update is not None:
        handle = lowtide.swap_weights(model, optimizer, update=update, min_bytes=1)
    tide = lowtide.apply(model, plan, optimizer=optimizer) if plan is not None else None
    result = zoo.train(case, model, optimizer, 3, num_steps=3, device=HERE)
    if tide is not None:
        tide.remove()
    if handle is not None:
        handle.remove()
        result.parameters.update({f"3:{n}": p.detach().clone() for n, p in model.named_parameters()})
    return _on_host(result)


@pytest.mark.parametrize(("name", "policy"), in_turn(3, NAMES, ["late", "early", "hidden", 5, 11]))
def test_plain_bits_whatever_copies_do(name: str, policy: str | int) -> None:
    device.play("early")
    layers = list(zoo.CASES[name].layers)
    plan = None if policy == "late" else zoo.mixed(swap=layers[::2], recompute=layers[1::2])
    plain = _trained(name, None, None)
    device.play(policy)
    device.forget_violations()
    found = _trained(name, plan, "in_backward")
    device.play("early")
    assert not device.violations()
    assert {k: v.tolist() for k, v in found.loss.items()} == {k: v.tolist() for k, v in plain.loss.items()}
    for key, value in plain.parameters.items():
        assert torch.equal(found.parameters[key], value), key


def test_a_checkpoint_has_the_right_numbers_and_can_be_loaded() -> None:
    case = zoo.CASES["llama"]
    model, other = case.build(3, HERE), case.build(4, HERE)
    optimizer = zoo.make_optimizer(model)
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    new = {name: value.cpu() for name, value in other.state_dict().items()}
    with lowtide.swap_weights(model, optimizer, min_bytes=1) as handle:
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
        model.load_state_dict(new)
        assert all(torch.equal(value.cpu(), new[name]) for name, value in model.state_dict().items())
        with handle.here():
            assert all(torch.equal(value.cpu(), new[name]) for name, value in model.named_parameters())
    assert all(torch.equal(value.cpu(), new[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("policy", ["late", 7])
def test_weights_in_main_memory_go_straight_to_their_tier(policy: str | int) -> None:
    """The device never holds more than one of them, and the optimizer stays the one that was made on the host."""
    case = zoo.CASES["llama"]
    device.play("early")
    plain = _trained("llama", None, None)
    device.play(policy)
    device.forget_violations()
    model = case.build(3, HERE).to("cpu")
    optimizer = zoo.make_optimizer(model)
    handle = lowtide.swap_weights(model, optimizer, min_bytes=1, device=HERE)
    assert handle.stats.peak_bytes <= max(parameter.nbytes for parameter in model.parameters())
    result = zoo.train(case, model, optimizer, 3, num_steps=3, device=HERE)
    handle.remove()
    device.play("early")
    assert not device.violations()
    assert {k: v.tolist() for k, v in result.loss.items()} == {k: v.cpu().tolist() for k, v in plain.loss.items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().cpu(), plain.parameters[f"3:{name}"]), name


@pytest.mark.parametrize("use", [copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied_while_its_weights_are_away(use: Callable[[nn.Module], Any]) -> None:
    model = zoo.CASES["llama"].build(3, HERE)
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    with lowtide.swap_weights(model, zoo.make_optimizer(model), min_bytes=1) as handle:
        with pytest.raises(ConfigError) as caught:
            use(model)
        assert str(caught.value) == (
            "lowtide.swap_weights: this model is copied or pickled as a whole, and weights of it are away. Do it "
            "inside of 'with handle.here():', or save model.state_dict()"
        )
        with handle.here():
            made = use(model)
    copied = pickle.loads(made) if isinstance(made, bytes) else made
    assert all(torch.equal(value.cpu(), before[name]) for name, value in copied.state_dict().items())


@pytest.mark.parametrize("use", ["forward", "state_dict", "remove"])
@pytest.mark.parametrize("write", [nn.init.zeros_, lambda weight: weight.detach()[0].fill_(1)])
def test_a_fill_while_a_weight_is_away_is_refused_and_undone(write: Callable, use: str) -> None:
    """One number stands for all of it, so no other write goes through."""
    case = zoo.CASES["llama"]
    model = case.build(3, HERE)
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    handle = lowtide.swap_weights(model, zoo.make_optimizer(model), min_bytes=1)
    write(next(iter(handle.weights)))
    uses = {"forward": lambda: handle.here().__enter__(), "state_dict": model.state_dict, "remove": handle.remove}
    with pytest.raises(
        RuntimeError, match=r"^lowtide: .* was written to while it was not on standin:0, and is as it was"
    ):
        uses[use]()
    handle.remove()
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())


def test_gradients_that_are_filled_while_they_are_away() -> None:
    """The next ones would be added to what was there before."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(HERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.swap_weights(model, optimizer, min_bytes=1):
        model(torch.ones(2, 16, device=HERE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        loss = model(torch.ones(2, 16, device=HERE)).sum()
        with pytest.raises(
            RuntimeError, match=r"^lowtide: the gradient of 2\.weight was written to .* call zero_grad\(\)"
        ):
            loss.backward()


@torch.no_grad()
def test_data_that_is_exchanged_while_a_weight_is_away_is_refused() -> None:
    """As an average of weights is lent for an evaluation: what shows in place of the weight has no bytes."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(HERE)
    x, mean = torch.ones(2, 16, device=HERE), torch.ones(16, 16, device=HERE)
    weight = model[1].weight
    with lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), min_bytes=1) as handle:
        before = model(x)
        with handle.here():
            back, weight.data = weight.data, mean
            assert not torch.equal(model(x), before)
            weight.data = back
            del back  # who keeps it keeps the weight on the device
        assert torch.equal(model(x), before)
        back, weight.data = weight.data, mean
        with pytest.raises(RuntimeError, match=r"^lowtide: 1\.weight was given other memory, and .* put that back"):
            model(x)
        weight.data = back
        assert torch.equal(model(x), before)


def test_what_backward_gives_stays_while_all_of_it_is_to_be_here() -> None:
    results = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(HERE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = lowtide.swap_weights(model, optimizer, min_bytes=1) if is_swapped else None
        for _ in range(2):
            with contextlib.nullcontext() if handle is None else handle.here():
                model(torch.ones(2, 16, device=HERE)).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                results.append([parameter.detach().cpu() for parameter in model.parameters()])
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
    assert all(torch.equal(*pair) for one, other in zip(results[:2], results[2:]) for pair in zip(one, other))


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3))).to(HERE)


def test_a_checkpoint_of_a_part_has_the_right_numbers() -> None:
    model = _small()
    before = {name: value.cpu() for name, value in model[1].state_dict().items()}
    with lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), min_bytes=1):
        for prefix in ("", "part."):
            found = model[1].state_dict(prefix=prefix)
            assert all(torch.equal(value.cpu(), before[name.removeprefix(prefix)]) for name, value in found.items())
        model[0].load_state_dict(model[1].state_dict())
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model[0].state_dict().items())


def test_weights_that_are_assigned_from_main_memory_are_refused() -> None:
    model = _small()
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    with lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), min_bytes=1):
        with pytest.raises(
            ConfigError, match=r"^lowtide.swap_weights: load_state_dict\(assign=True\) would put tensors"
        ):
            model.load_state_dict(model.state_dict(), assign=True)
        model.load_state_dict({name: value.to(HERE) for name, value in before.items()}, assign=True)
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("types", [(torch.bfloat16,), (torch.float64, torch.float32)])
@pytest.mark.parametrize("use", ["forward", "remove"])
def test_a_model_that_is_cast_while_its_weights_are_away_is_put_back(types: tuple[torch.dtype, ...], use: str) -> None:
    model = _small()
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    handle = lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), min_bytes=1)
    for dtype in types:
        model.to(dtype)
    call = functools.partial(model, torch.ones(2, 16, device=HERE)) if use == "forward" else handle.remove
    with pytest.raises(RuntimeError, match=r"^lowtide: .* was copied while it was not on standin:0 \(model.to"):
        call()
    handle.remove()
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())


def test_weights_that_are_not_numbers_are_weights() -> None:
    model = _small()
    handle = lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), min_bytes=1)
    with handle.here():
        for parameter in model.parameters():
            parameter.data = parameter.data * float("nan")
    with handle.here():
        assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    handle.remove()
    with lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), min_bytes=1):
        assert all(bool(value.isnan().all()) for value in model.state_dict().values())
