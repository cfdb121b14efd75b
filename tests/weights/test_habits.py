"""What users do with a model whose weights are elsewhere: read, write, save, load, average, freeze; and what fails."""

from __future__ import annotations

import copy
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import lowtide
from lowtide.engines.host import HostEngine
from lowtide.tensors import private
from lowtide.tensors.view import sum_of_bytes
from tests.support.grid import one_of
from tests.support.virtual_engine import VirtualEngine
from tests.weights.test_bit_equality import Small

TOKENS = torch.arange(16).reshape(2, 8)


def two() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """A model whose weights are swapped by the caller, and a plain one like it."""
    torch.manual_seed(0)
    model = Small()
    plain = copy.deepcopy(model)
    made = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    return model, made[0], plain, made[1]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name


def _write_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _assign_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _average(model: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


def _evaluate_and_write(model: nn.Module) -> None:
    with torch.no_grad():
        model(TOKENS)
    _write_data(model)


def _write_in_between(model: nn.Module) -> None:
    loss = model(TOKENS)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad)


def _exchange_weights(model: nn.Module) -> None:
    one, other = model.layers[0].down.weight, model.layers[1].down.weight
    one.data, other.data = other.data, one.data


HABITS: list[Callable[[nn.Module], None]] = [
    *(_write_data, _assign_data, _write, _load, _average, _evaluate_and_write, _write_in_between, _exchange_weights)
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_between_steps(habit: Callable[[nn.Module], None]) -> None:
    model, optimizer, plain, plain_optimizer = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1):
        for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
            step(each, its_own)
            habit(each)
            step(each, its_own)
        assert_alike(model, plain)
    assert_alike(model, plain)


ROOMY = 20_000
"""Bytes: most of what comes next finds room ahead of its turn."""


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _scale_data_of_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.25)


def _rest(*_: object) -> None:
    """Copies that are under way come to their end."""
    time.sleep(0.01)


def _same_as_plain(one_step: Callable[[nn.Module], None]) -> None:
    """Three steps with swapped weights and without. Each copy ends before the next layer begins, so that much has been
    fetched ahead when the loop's own code runs."""
    model, optimizer, plain, plain_optimizer = two()
    for layer in model.layers:
        layer.register_forward_pre_hook(_rest)
        layer.register_full_backward_pre_hook(_rest)
    with lowtide.swap_weights(model, optimizer, min_bytes=1, engine="host") as handle:
        handle._moves.stats.window_bytes = ROOMY
        for _ in range(3):
            for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
                one_step(each)
                its_own.step()
                its_own.zero_grad()
        assert_alike(model, plain)


@pytest.mark.parametrize(
    "habit", [_clip, _scale_data_of_gradients, _write, _write_data], ids=lambda habit: habit.__name__
)
def test_a_habit_between_backward_and_step(habit: Callable[[nn.Module], None]) -> None:
    """From the second step on, what the update needs could be on its way already when it is written to."""

    def one_step(model: nn.Module) -> None:
        model(TOKENS).backward()
        habit(model)

    _same_as_plain(one_step)


@pytest.mark.parametrize("habit", [_scale_data_of_gradients, _write_data], ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("place", ["between forward and backward", "between micro-batches"])
def test_a_habit_between_what_is_accumulated(habit: Callable[[nn.Module], None], place: str) -> None:
    """From the second step on, what the next pass needs could be on its way when the loop writes to it, which no
    version counts."""

    def one_step(model: nn.Module) -> None:
        for micro in range(3):
            loss = model(TOKENS)
            if micro and place.endswith("backward"):
                habit(model)
            loss.backward()
            if place.endswith("batches"):
                habit(model)

    _same_as_plain(one_step)


@pytest.mark.parametrize("habit", [_scale_data_of_gradients, _write_data], ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("place", ["between two passes", "after them"])
def test_a_habit_beside_a_graph_that_is_used_twice(habit: Callable[[nn.Module], None], place: str) -> None:
    """After the last layer of a pass the first of the next one could be on its way."""

    def one_step(model: nn.Module) -> None:
        loss = model(TOKENS)
        loss.backward(retain_graph=True)
        if place == "between two passes":
            habit(model)
        loss.backward()
        if place == "after them":
            habit(model)

    _same_as_plain(one_step)


def test_a_weight_that_is_written_to_while_it_is_on_its_way() -> None:
    """A layer halves a weight of the one after it, in place, before that one's turn."""
    model, optimizer, plain, plain_optimizer = two()
    for each in (model, plain):
        following = each.layers[2].down.weight

        def halve(*_: object, following: torch.Tensor = following) -> None:
            _rest()
            with torch.no_grad():
                following.mul_(0.5)

        each.layers[1].down.register_forward_pre_hook(halve)
    with lowtide.swap_weights(model, optimizer, min_bytes=1, engine="host") as handle:
        handle._moves.stats.window_bytes = ROOMY
        for _ in range(3):
            for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
                step(each, its_own)
        assert_alike(model, plain)


def _in_parts(model: nn.Module, write: Callable[[nn.Module], None]) -> torch.Tensor:
    """A forward that calls the parts of a model by themselves."""
    x = model.embed(TOKENS)
    for layer in model.layers:
        write(model)
        x = layer(x)
    write(model)
    return torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), TOKENS.flatten())


@pytest.mark.parametrize("is_inside", [False, True], ids=["by the loop", "by the model"])
def test_a_write_past_versions_between_the_calls_of_layers(is_inside: bool) -> None:
    """Of weights of the next layers, which could be on their way: as PEFT merges adapters after `generate`."""

    def write(model: nn.Module) -> None:
        _rest()
        model.head.weight.data.mul_(0.9)
        model.layers[2].up.weight.data.mul_(0.9)

    def one_step(model: nn.Module) -> None:
        if not is_inside:
            _in_parts(model, write).backward()
            return
        hooks = [layer.register_forward_hook(lambda *_: write(model)) for layer in model.layers]
        model(TOKENS).backward()
        for hook in hooks:
            hook.remove()

    _same_as_plain(one_step)


@pytest.mark.parametrize("change", [lambda data: data.flip(0), lambda data: -data], ids=["rows", "signs"])
def test_a_write_past_versions_that_keeps_the_sum(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, optimizer, plain, plain_optimizer = two()
    signs = (torch.arange(32 * 24) // 2 % 2 * 2 - 1).view(32, 24)  # as many of each in both halves of 8 bytes
    with lowtide.swap_weights(model, optimizer, min_bytes=1, engine=VirtualEngine(0)):
        for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
            step(each, its_own)
            with torch.no_grad():
                each.head.weight.copy_(each.head.weight.abs() * signs)
            loss = each(TOKENS)
            each.head.weight.data.copy_(change(each.head.weight.data))
            loss.backward()
            its_own.step()
        assert_alike(model, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("size", [(24, 24), (7,)])
def test_a_sum_of_bytes_sees_what_is_done_to_all_of_a_weight(size: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    changed = [weight.neg(), weight.conj_physical() * 1, weight.flip(-1), weight.roll(1, 0), weight * 2]
    changed.append(weight.abs().to(dtype))
    for other in changed:
        one, sums = weight.clone(), []
        sums.append(sum_of_bytes(one))
        one.copy_(other)
        assert not torch.equal(sums[0], sum_of_bytes(one)) or torch.equal(weight, other)


def test_a_sum_of_bytes_is_that_of_the_bytes_wherever_they_begin() -> None:
    flat = torch.randn(5000).to(torch.bfloat16)
    for start in range(5):
        part = flat[start : start + 4099]
        assert torch.equal(sum_of_bytes(part), sum_of_bytes(part.clone())), start


def test_a_sum_of_bytes_sees_two_elements_that_change_places() -> None:
    weight = torch.randn(96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, flat = sum_of_bytes(weight), weight.view(-1)
    for place in range(5, len(flat), 5):
        flat[[0, place]] = flat[[place, 0]]
        assert not torch.equal(before, sum_of_bytes(weight)), place
        flat[[0, place]] = flat[[place, 0]]


@pytest.mark.parametrize("update", ["step", "in_backward"])
@pytest.mark.parametrize("kind", ["unfrozen", "in a new group"])
def test_gradients_leave_of_weights_that_are_trained_later(kind: str, update: str) -> None:
    model, *_ = two()
    model.layers.requires_grad_(kind != "unfrozen")
    late = [*model.layers.parameters()]
    first = [p for p in model.parameters() if kind == "unfrozen" or all(p is not each for each in late)]
    optimizer = torch.optim.AdamW(first, lr=1e-2)
    how: Any = {"min_bytes": 1, "update": update, "bucket_bytes": 4096}
    with lowtide.swap_weights(model, optimizer, engine=VirtualEngine(0), **how) as handle:
        step(model, optimizer)
        if kind == "unfrozen":
            model.requires_grad_(True)
        else:
            optimizer.add_param_group({"params": late})
        model.zero_grad()
        model(TOKENS).backward()
        away = handle._moves.items
        left = [p.grad for p in late if p.grad is not None]
        stays = [each for each in left if private.storage_key(each.untyped_storage()) not in away]
        assert sum(each.nbytes for each in stays) <= 3 * 4096


@pytest.mark.filterwarnings("error:lowtide")
def test_a_weight_that_is_read_past_the_forward_of_its_module() -> None:
    """As PEFT reads a prompt."""

    def one_step(model: nn.Module) -> None:
        x = torch.nn.functional.embedding(TOKENS, model.embed.weight)
        torch.nn.functional.linear(model.layers[0](x), model.head.weight).square().mean().backward()
        for parameter in model.layers[1:].parameters():
            parameter.grad = None

    _same_as_plain(one_step)


def test_weights_in_shared_memory_are_refused() -> None:
    """What a slot shows is not what is in it then."""
    model, optimizer, *_ = two()
    handle = lowtide.swap_weights(model, optimizer, min_bytes=1)
    before = copy.deepcopy(model.state_dict())
    model.share_memory()
    with pytest.raises(RuntimeError, match=r"^lowtide: embed.weight is shared by processes now; call remove"):
        model(TOKENS)
    handle.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _keep_data(model: nn.Module, kept: dict[str, Any]) -> None:
    kept.setdefault("data", [parameter.data for parameter in model.parameters()])
    for data in kept["data"]:
        data.mul_(0.9)


def _keep_flat(model: nn.Module, kept: dict[str, Any]) -> None:
    if not kept:
        kept["data"] = [nn.utils.parameters_to_vector(model.parameters()).detach()]
        nn.utils.vector_to_parameters(kept["data"][0], model.parameters())
    kept["data"][0].mul_(0.9)


def _exchange_data(model: nn.Module, kept: dict[str, Any]) -> None:
    others = kept.setdefault("data", [torch.full_like(parameter, 0.01) for parameter in model.parameters()])
    for parameter, other in zip(model.parameters(), others, strict=True):
        parameter.data, other.data = other.data, parameter.data


def _seen_in_forward(model: nn.Module, kept: dict[str, Any]) -> None:
    if kept:
        kept["data"][0].renorm_(2, 0, 0.3)
        return
    layer = model.layers[1].up
    layer.register_forward_pre_hook(lambda *_: kept.update(data=[layer.weight.detach()]))


def _keep_gradients(model: nn.Module, kept: dict[str, Any]) -> None:
    kept.setdefault("data", []).extend(parameter.grad for parameter in model.parameters())


def _keep_views_of_gradients(model: nn.Module, kept: dict[str, Any]) -> None:
    kept.setdefault("data", []).extend(parameter.grad.detach() for parameter in model.parameters())


def _gradients_in_one(model: nn.Module, kept: dict[str, Any]) -> None:
    """As of a buffer that ranks reduce."""
    if not kept:
        kept["data"] = [torch.zeros(sum(parameter.numel() for parameter in model.parameters()))]
    kept["data"][0].mul_(0.5)
    parts = kept["data"][0].split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)


@pytest.mark.filterwarnings("ignore:lowtide. .* stays on cpu. somebody has kept:RuntimeWarning")
@pytest.mark.parametrize("update", ["step", "in_backward"])
@pytest.mark.parametrize(
    "keep",
    [
        *(_keep_data, _keep_flat, _exchange_data, _seen_in_forward),
        *(_keep_gradients, _keep_views_of_gradients, _gradients_in_one),
    ],
    ids=lambda keep: keep.__name__,
)
def test_what_somebody_keeps_of_a_weight_or_gradient(keep: Callable[..., None], update: str) -> None:
    if "gradients" in keep.__name__ if update == "in_backward" else keep is _keep_data:
        return
    model, optimizer, plain, plain_optimizer = two()
    kept: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    with lowtide.swap_weights(model, optimizer, min_bytes=1, update=update):
        for _ in range(4):
            for each, its_own, its_kept in ((model, optimizer, kept[0]), (plain, plain_optimizer, kept[1])):
                each(TOKENS).backward()
                if update == "step":
                    keep(each, its_kept)
                its_own.step()
                its_own.zero_grad()
                if update == "in_backward":
                    keep(each, its_kept)
        assert_alike(model, plain)
        for one, other in zip(kept[0]["data"], kept[1]["data"], strict=True):
            assert torch.equal(one, other)
        model.zero_grad()


def test_a_weight_that_somebody_keeps_stays_and_leaves_when_he_lets_go() -> None:
    model, optimizer, *_ = two()
    kept = model.layers[1].up.weight.detach()
    with pytest.warns(RuntimeWarning, match=r"^lowtide: layers.1.up.weight stays on cpu: somebody has kept a view, .d"):
        handle = lowtide.swap_weights(model, optimizer, min_bytes=1)
    step(model, optimizer)
    assert torch.equal(kept, model.layers[1].up.weight)
    del kept
    step(model, optimizer)
    assert handle._moves.here_bytes == 0
    handle.remove()


@pytest.mark.parametrize("update", ["step", "in_backward"])
def test_weights_that_are_lent_for_an_evaluation(update: str) -> None:
    """As averages of weights are, through `.data`: what comes back has the bytes of before, and the slot has others."""
    model, optimizer, plain, plain_optimizer = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1, update=update) as handle:
        handle._moves.stats.window_bytes = ROOMY
        for _ in range(3):
            for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
                step(each, its_own)
                own = [parameter.detach().clone() for parameter in each.parameters()]
                for parameter in each.parameters():
                    parameter.data.mul_(0.9)
                loss = each(TOKENS)  # some stay on the device
                for parameter, before in zip(each.parameters(), own, strict=True):
                    parameter.data.copy_(before)
                del loss
                assert all(map(torch.equal, each.parameters(), own))
        assert_alike(model, plain)


def test_what_is_written_past_its_version_on_its_way_out_goes_all_the_same() -> None:
    """It is sent once more, and leaves when that copy is complete."""
    model, optimizer, *_ = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1, engine=VirtualEngine(1)) as handle:
        moves, weight = handle._moves, model.layers[1].up.weight
        moves.bring([handle.weights[weight]])
        weight.detach().add_(1)
        moves.leave(handle.weights[weight])
        expected = weight.data.mul_(0.5).clone()
        moves.hide_all()
        assert handle.weights[weight].is_away
        assert moves.here_bytes == 0
        assert torch.equal(weight, expected)


@pytest.mark.filterwarnings("ignore:lowtide. .* stays on the .* somebody has kept:RuntimeWarning")
@pytest.mark.parametrize("update", ["step", "in_backward"])
@pytest.mark.parametrize("when", ["after the forward", "after the backward", "after remove"])
@pytest.mark.parametrize(
    "take", [lambda p: p.data, lambda p: p.detach()[:2], lambda p: torch.from_numpy(p.data.numpy())]
)
def test_a_write_through_what_was_kept_of_a_weight_that_was_away(take: Callable, when: str, update: str) -> None:
    model, optimizer, plain, plain_optimizer = two()
    handle = lowtide.swap_weights(model, optimizer, min_bytes=1, update=update)
    kept = [take(each.layers[1].up.weight) for each in (model, plain)]
    for each, its_own, its_kept in ((model, optimizer, kept[0]), (plain, plain_optimizer, kept[1])):
        loss = each(TOKENS)
        if when == "after the forward":
            its_kept.data.mul_(0.5)
        loss.backward()
        if when == "after the backward":
            its_kept.mul_(0.5)
        its_own.step()
    if when == "after remove":
        handle.remove()
        for each in kept:
            each.mul_(0.5)
    assert torch.equal(kept[0], kept[1])
    assert_alike(model, plain)
    handle.remove()
    assert_alike(model, plain)


class Clamped(nn.Linear):
    """Writes to its own weight through `.data`, from some forward on."""

    num_before = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_before <= 0:
            self.weight.data.clamp_(-0.05, 0.05)
        self.num_before -= 1
        return super().forward(x)


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_forward_that_writes_through_data(num_before: int) -> None:
    results = []
    for swapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Clamped(24, 24) for _ in range(4)))
        for layer in model:
            layer.num_before = num_before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        handle = lowtide.swap_weights(model, optimizer, min_bytes=1) if swapped else None
        for number in range(5):
            model(torch.full((2, 24), 0.1 * number)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_graph_that_is_older_than_remove() -> None:
    results = []
    for swapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        handle = lowtide.swap_weights(model, optimizer, min_bytes=1) if swapped else None
        for number in range(3):
            loss = model(torch.full((2, 24), 0.1 * number)).square().sum()
            if handle is not None and number == 1:
                handle.remove()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_weight_written_between_forward_and_backward_is_plain_autograds_error() -> None:
    model, optimizer, *_ = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1):
        loss = model(TOKENS)
        with torch.no_grad():
            model.layers[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_memory_that_is_given_to_a_weight_between_forward_and_backward_is_refused() -> None:
    """Autograd has saved a view of what was there before, which has gone by then."""
    model, optimizer, *_ = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1):
        loss = model(TOKENS)
        model.layers[1].up.weight.data = model.layers[1].up.weight.data * 2
        with pytest.raises(
            RuntimeError, match=r"^lowtide: layers\.1\.up\.weight was given other memory \(\.data = \.\.\.\)"
        ):
            loss.backward()


def test_sparse_gradients() -> None:
    model, _, plain, _ = two()
    for each in (model, plain):
        each.embed.sparse = True
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    with lowtide.swap_weights(model, optimizers[0], min_bytes=1):
        for _ in range(3):
            step(model, optimizers[0])
            step(plain, optimizers[1])
        assert_alike(model, plain)


def _all_gradients_at_once(model: nn.Module) -> torch.Tensor:
    copies = {name: parameter * 1.0 for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, copies, (TOKENS,))


def test_the_window_holds_where_gradients_come_together() -> None:
    """What comes out of order waits for room, but for the one gradient that autograd has just made."""
    model, optimizer, *_ = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1, bucket_bytes=4096, engine="host") as handle:
        for _ in range(3):
            _all_gradients_at_once(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        largest = max(parameter.nbytes for parameter in model.parameters())
        assert handle.stats.peak_bytes <= handle.stats.window_bytes + largest


@pytest.mark.parametrize("which", ["some", "all"])
def test_the_window_holds_where_gradients_are_dropped(which: str) -> None:
    model, optimizer, *_ = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1, bucket_bytes=4096, engine=VirtualEngine(0)) as handle:
        for number in range(4):
            model(TOKENS).backward()
            for place, parameter in enumerate(model.parameters()):
                if which == "all" or (place + number) % 2:
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert handle.stats.peak_bytes <= handle.stats.window_bytes


@pytest.mark.parametrize("update", ["step", "in_backward"])
def test_the_window_holds_where_the_state_is_small(update: str) -> None:
    """A bucket of Adafactor's state would be that of all layers."""
    model, plain = (nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adafactor(each.parameters()) for each in (model, plain)]
    with lowtide.swap_weights(model, optimizers[0], min_bytes=1, budget="1MiB", update=update) as handle:
        for _ in range(3):
            for each, its_own in ((model, optimizers[0]), (plain, optimizers[1])):
                each(torch.ones(4, 128)).square().mean().backward()
                its_own.step()
                its_own.zero_grad()
        assert handle.stats.peak_bytes <= handle.stats.window_bytes
    assert_alike(model, plain)


def test_second_backward_and_frozen_weights() -> None:
    model, _, plain, _ = two()
    for each in (model, plain):
        each.embed.weight.requires_grad_(False)
        each.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with lowtide.swap_weights(model, optimizer, min_bytes=1):
        for each in (model, plain):
            loss = each(TOKENS)
            loss.backward(retain_graph=True)
            loss.backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)


def test_lora_by_peft() -> None:
    peft = pytest.importorskip("peft")
    losses = []
    for swapped in (False, True):
        torch.manual_seed(0)
        model = peft.get_peft_model(Small(), peft.LoraConfig(r=2, target_modules=["up", "down"]))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        handle = lowtide.swap_weights(model, optimizer, min_bytes=1) if swapped else None
        for _ in range(3):
            loss = model(TOKENS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if handle is not None:
            handle.remove()
    assert losses[:3] == losses[3:]


def test_a_budget_keeps_what_it_can() -> None:
    model = Small(num_layers=12)
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.swap_weights(model, optimizer, min_bytes=1, budget="1GiB") as handle:
        assert handle.stats.swapped_bytes == 0
    least = _least(model, optimizer)
    with lowtide.swap_weights(model, optimizer, min_bytes=1, budget=least) as handle:
        step(model, optimizer)
        assert handle.stats.peak_bytes <= handle.stats.window_bytes <= least
        all_of_it = handle.stats.swapped_bytes
    with lowtide.swap_weights(model, optimizer, min_bytes=1, budget=least + 90_000) as handle:
        step(model, optimizer)
        assert 0 < handle.stats.swapped_bytes < all_of_it
        assert handle.stats.peak_bytes <= handle.stats.window_bytes


def _least(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    with pytest.raises(lowtide.ConfigError, match="is too small: the largest part") as caught:
        lowtide.swap_weights(model, optimizer, min_bytes=1, budget=4096)
    number, unit = str(caught.value).split(" are needed")[0].split()[-2:]
    return int((float(number) + 0.05) * {"KiB": 2**10, "MiB": 2**20}[unit])


REFUSALS: list[tuple[str, Callable[[nn.Module, Any], object]]] = [
    ("optimizer= is missing", lambda model, _: lowtide.swap_weights(model)),
    ("'later' is none of step, in_backward", lambda model, o: lowtide.swap_weights(model, o, update="later")),
    ("takes a torch.nn.Module, not int", lambda _, o: lowtide.swap_weights(3, o)),  # type: ignore[arg-type]
    ("has no weights of 1.0 GiB and more", lambda model, o: lowtide.swap_weights(model, o, min_bytes="1GiB")),
    ("is compiled", lambda model, o: (model.layers[0].compile(), lowtide.swap_weights(model, o, min_bytes=1))),
    (
        "its module '1' is compiled \\(torch.jit\\)",
        lambda model, o: lowtide.swap_weights(nn.Sequential(model, torch.jit.script(nn.Linear(4, 4))), o, min_bytes=1),
    ),
    ("swapped already", lambda model, o: [lowtide.swap_weights(model, o, min_bytes=1) for _ in range(2)]),
    (
        "the weights of this model are swapped already",
        lambda model, o: [
            lowtide.swap_weights(each, torch.optim.SGD(model.parameters(), 0.1), min_bytes=1)
            for each in (model, nn.Sequential(model))
        ],
    ),
    (
        "has a part of this model; call remove\\(\\) there",
        lambda model, o: (lowtide.swap_weights(model, o, min_bytes=1), lowtide.apply(nn.Sequential(model), {})),
    ),
    (
        "has parameters on meta; all must be on one device, with memory",
        lambda model, o: lowtide.swap_weights(model.to("meta"), o),
    ),
]


@pytest.mark.parametrize(("text", "call"), REFUSALS, ids=[text for text, _ in REFUSALS])
def test_refusals_say_what_and_why(text: str, call: Callable[[nn.Module, Any], object]) -> None:
    model, optimizer, *_ = two()
    with pytest.raises(lowtide.ConfigError, match=text):
        call(model, optimizer)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, 128) -> (N, 128)
        return torch.func.grad(lambda y: self.inner(y).square().sum())(x)


def test_torch_func_in_a_layer_is_refused_by_name() -> None:
    model = nn.Sequential(*(Functional() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    with lowtide.swap_weights(model, optimizer, min_bytes=1), pytest.raises(lowtide.ConfigError) as caught:
        model(torch.randn(4, 128))
    assert str(caught.value) == (
        "lowtide.swap_weights: '0' (Functional) uses torch.func (grad, vjp, jacrev or hessian), around which PyTorch "
        "allows no saved-tensor hooks, so its weights cannot come and go; swap the optimizer's state alone "
        "(swap_optimizer)"
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fsdp2_is_refused_by_name() -> None:
    model, optimizer, *_ = two()
    sharded = type("Sharded", (Small, fsdp.FSDPModule), {})
    model.__class__ = sharded
    with pytest.raises(lowtide.ConfigError, match=r"sharded by FSDP2 \(fully_shard\)"):
        lowtide.swap_weights(model, optimizer, min_bytes=1)


def test_a_full_tier_is_an_error_and_leaves_the_model_plain() -> None:
    model, optimizer, plain, plain_optimizer = two()
    engine = HostEngine(disk_budget_bytes=40_000)
    with pytest.raises(lowtide.ConfigError, match=r"of weights and gradients have no room on disk \(disk budget"):
        lowtide.swap_weights(model, optimizer, min_bytes=1, engine=engine)
    assert not any(engine.memory_in_use().values())
    for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
        step(each, its_own)
    assert_alike(model, plain)
    assert "forward" not in vars(model.layers[0])


def test_a_copy_that_fails_later_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, plain, plain_optimizer = two()
    engine = HostEngine()
    write, failing = engine.disk.write, [False]

    def refuse(offset: int, address: int, nbytes: int) -> None:
        if failing[0]:
            raise OSError(28, "No space left on device")
        write(offset, address, nbytes)

    engine.disk.write = refuse  # type: ignore[method-assign]
    with lowtide.swap_weights(model, optimizer, min_bytes=1, engine=engine):
        for number in range(4):
            failing[0] = number == 1
            for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
                if failing[0] and each is model:
                    with pytest.warns(RuntimeWarning, match="could not be written to the disk"):
                        step(each, its_own)
                else:
                    step(each, its_own)
        assert_alike(model, plain)
    assert_alike(model, plain)


# One that comes within a finalizer is only printed, by Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", one_of(3, range(24)))
def test_ctrl_c_in_every_phase_loses_nothing(seed: int) -> None:
    """After it each weight has its bytes of before the step or of after it, or has only decayed, where the interrupt
    came within the optimizer's own lines, as in plain torch. The model can be made plain."""
    model, optimizer, plain, plain_optimizer = two()
    handle = lowtide.swap_weights(model, optimizer, min_bytes=1, update=("step", "in_backward")[seed % 2])
    for each, its_own in ((model, optimizer), (plain, plain_optimizer)):
        step(each, its_own)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    began = time.perf_counter()
    step(plain, plain_optimizer)
    wait = random.Random(seed).uniform(0.0, 12 * (time.perf_counter() - began))
    timer = threading.Timer(wait, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        step(model, optimizer)
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    after = [parameter.detach().clone() for parameter in model.parameters()]
    for found, old, new in zip(after, before, plain.parameters(), strict=True):
        assert any(torch.equal(found, each) for each in (old, new, old * (1 - 1e-2 * 1e-2)))
    try:
        handle.remove()
    except KeyboardInterrupt:
        handle.remove()
    assert all(map(torch.equal, model.parameters(), after))
    model(TOKENS).backward()


def test_nothing_is_left_behind() -> None:
    engine = VirtualEngine(1)
    model, optimizer, *_ = two()
    kept = {name: [*vars(module)] for name, module in model.named_modules()}
    ids = [id(parameter) for parameter in model.parameters()]
    for _ in range(3):
        with lowtide.swap_weights(model, optimizer, min_bytes=1, engine=engine):
            step(model, optimizer)
    assert {name: [*vars(module)] for name, module in model.named_modules()} == kept
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())
    assert engine.num_slots == 0


def test_a_recurrent_module_holds_no_slot_after_functional_call() -> None:
    """Its list of weights has the tensors of that call until its next forward."""
    engine = VirtualEngine(0)
    model = nn.Sequential(nn.LSTM(8, 8))
    before = [id(parameter) for parameter in model[0].parameters()]
    with lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), 0.1), min_bytes=1, engine=engine):
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        x = torch.randn(3, 2, 8)
        torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (x,))[0].sum())(weights)
        weights.clear()
    assert engine.num_slots == 0
    assert [id(parameter) for parameter in private.flat_weights(model[0])] == before


@pytest.mark.parametrize("use", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_is_plain(use: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer, plain, plain_optimizer = two()
    with lowtide.swap_weights(model, optimizer, min_bytes=1):
        step(model, optimizer)
        copied = use(model)
        step(model, optimizer)
    step(plain, plain_optimizer)
    assert_alike(copied, plain)
    copied.load_state_dict(model.state_dict())
    assert_alike(copied, model)
