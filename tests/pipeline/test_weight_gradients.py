"""Weight gradients that are put off are those of torch to the bit, and the weight's hooks see one backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import ConfigError
from lowtide.pipeline.weight_gradients import WeightGradients, grouped_linear, linear
from tests.support.zoo import same_bits

CHUNK = (0, 0)


def _with_split(step: Callable[[], Tensor], weights: list[Tensor]) -> None:
    """A step whose backward is split; gradients of `weights` must not be there before W."""
    store = WeightGradients()
    with store.forward(CHUNK):
        output = step()
    gradient = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    with store.put_off(CHUNK):
        output.backward(gradient)
    assert all(weight.grad is None for weight in weights)
    store.run(CHUNK)


def _plain(step: Callable[[], Tensor]) -> None:
    output = step()
    output.backward(torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 5, 33), (2, 3, 5, 33), (0, 33)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("needs_input", [True, False])
def test_linear_has_the_bits_of_torch(
    dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool, needs_input: bool
) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=needs_input)
    weight = torch.randn(7, 33, dtype=dtype, requires_grad=True)
    bias = torch.randn(7, dtype=dtype, requires_grad=True) if has_bias else None
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None and tensor.requires_grad]
    wanted = None
    for call in (
        lambda: _plain(lambda: F.linear(x, weight, bias)),
        lambda: _plain(lambda: linear(x, weight, bias)),
        lambda: _with_split(lambda: linear(x, weight, bias), [weight]),
    ):
        for tensor in tensors:
            tensor.grad = None
        call()
        gradients = [tensor.grad for tensor in tensors]
        wanted = wanted or gradients
        assert all(same_bits(got, want) for got, want in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows", [[3, 0, 5], [0, 0, 4], [2, 2, 2]])
def test_grouped_linear_has_the_bits_of_torch(rows: list[int], is_transposed: bool) -> None:
    x = torch.randn(sum(rows), 16, requires_grad=True)
    weight = torch.randn(3, *((24, 16) if is_transposed else (16, 24)), requires_grad=True)
    offsets = torch.tensor(rows).cumsum(0).to(torch.int32)

    def product(call: Callable[..., Tensor], *more: Tensor, **named: Tensor) -> Tensor:
        return call(x, weight.transpose(-2, -1) if is_transposed else weight, *more, **named)

    _plain(lambda: product(F.grouped_mm, offs=offsets))
    wanted = x.grad, weight.grad
    x.grad = weight.grad = None
    _with_split(lambda: product(grouped_linear, offsets), [weight])
    assert same_bits(x.grad, wanted[0])
    assert same_bits(weight.grad, wanted[1])


def test_a_weight_that_is_used_twice_is_added_once() -> None:
    x, weight = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))

    def twice(call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return call(torch.tanh(call(x, weight)), weight)

    weight.grad = torch.randn(8, 8)
    before = weight.grad.clone()
    _plain(lambda: twice(F.linear))
    wanted = weight.grad
    weight.grad = None
    store = WeightGradients()
    with store.forward(CHUNK):
        output = twice(linear)
    with store.put_off(CHUNK):
        output.backward(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    weight.grad = before
    store.run(CHUNK)
    assert same_bits(weight.grad, wanted)


def test_two_views_of_a_weight_are_added_up_before_they_are_added() -> None:
    """In float32, where the order of a sum shows; the gradient that is there already is the third term."""
    x, weight, before = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)

    def by_views(call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return call(torch.tanh(call(x, weight.view(8, 8))), weight.t().t())

    weight.grad = before.clone()
    _plain(lambda: by_views(F.linear))
    wanted = weight.grad
    weight.grad = None
    store = WeightGradients()
    with store.forward(CHUNK):
        output = by_views(linear)
    with store.put_off(CHUNK):
        output.backward(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    weight.grad = before.clone()
    store.run(CHUNK)
    assert same_bits(weight.grad, wanted)


def test_waits_run_products_before_all_uses_of_a_weight_have_come() -> None:
    """As experts have them, of which some compute between two waits. The sum comes last, and once."""
    x, weight, ran = torch.randn(4, 8, requires_grad=True), nn.Parameter(torch.randn(3, 8, 8)), []
    store = WeightGradients(most_kept=2)

    def one_after_another(call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        y = x
        for each in weight.unbind():
            y = torch.tanh(call(y, each))
            y.register_hook(lambda gradient: ran.append(store.at_wait(is_alone=True)))
        return y

    weight.grad = torch.randn(3, 8, 8)
    before = weight.grad.clone()
    _plain(lambda: one_after_another(F.linear))
    wanted, ran[:] = weight.grad, []
    weight.grad = before.clone()
    with store.forward(CHUNK):
        output = one_after_another(linear)
    with store.put_off(CHUNK):
        output.backward(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    assert ran == [False, True, True] and same_bits(weight.grad, before)
    store.finish()
    assert same_bits(weight.grad, wanted)


def test_hooks_of_the_weight_see_one_backward() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    seen: list[str] = []
    weight.register_hook(lambda gradient: seen.append("none" if gradient is None else "gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("added"))
    _with_split(lambda: linear(torch.randn(3, 4, requires_grad=True), weight), [weight])
    assert seen == ["gradient", "added"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_a_checkpoint(use_reentrant: bool) -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))

    def block(call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return checkpoint(lambda t: torch.tanh(call(t, weight)), x, use_reentrant=use_reentrant)

    _plain(lambda: block(F.linear))
    wanted = x.grad, weight.grad
    x.grad = weight.grad = None
    _with_split(lambda: block(linear), [weight])
    assert same_bits(x.grad, wanted[0])
    assert same_bits(weight.grad, wanted[1])


def test_under_autocast() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))
    bias = nn.Parameter(torch.randn(8))

    def cast(call: Callable[..., Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(x, weight, bias)

    _plain(lambda: cast(F.linear))
    wanted = x.grad, weight.grad, bias.grad
    x.grad = weight.grad = bias.grad = None
    _with_split(lambda: cast(linear), [weight])
    assert all(same_bits(*pair) for pair in zip((x.grad, weight.grad, bias.grad), wanted, strict=True))


@pytest.mark.parametrize("num_contexts", [1, 2])
def test_two_uses_under_autocast_are_added_up_where_it_adds_them(num_contexts: int) -> None:
    """In bf16 in the one cast that it keeps for a context, else in fp32."""
    x, weight = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    more = [] if num_contexts == 1 else [nn.Parameter(torch.randn(8))]

    def twice(call: Callable[..., Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.tanh(call(x, weight, *more))
            if num_contexts == 1:
                return call(y, weight)
        with torch.autocast("cpu", torch.bfloat16):
            return call(y, weight, *more)

    _plain(lambda: twice(F.linear))
    wanted = [each.grad for each in (weight, *more)]
    for each in (weight, *more):
        each.grad = None
    _with_split(lambda: twice(linear), [weight])
    assert all(same_bits(each.grad, want) for each, want in zip((weight, *more), wanted, strict=True))


def test_a_bias_that_autocast_casts_for_two_uses_is_refused() -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(ConfigError) as caught, WeightGradients().forward(CHUNK), torch.autocast("cpu", torch.bfloat16):
        linear(linear(torch.randn(4, 8), layer.weight, layer.bias), layer.weight, layer.bias)
    assert str(caught.value) == (
        "lowtide.pipeline: a linear layer of shape [8, 8] with a bias runs twice in one micro-batch under autocast, "
        "where the gradients of its bias would be added up in another type; give the layer no bias, the stage bf16 "
        "weights, or the pipeline no weight_gradients"
    )


def test_linear_layers_of_a_stage_put_off_by_themselves() -> None:
    """And those that cannot are left as they are; after `leave` all are."""
    stage = nn.ModuleDict({"own": nn.Linear(8, 8), "tied": nn.Linear(8, 8), "other": nn.Embedding(8, 8)})
    stage["other"].weight = stage["tied"].weight
    stage["by_keyword"], stage["made"] = nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def step() -> Tensor:
        x = stage["own"](stage["tied"](stage["other"](torch.arange(8))))
        return stage["made"](stage["by_keyword"](input=x))

    _plain(step)
    wanted = {name: parameter.grad for name, parameter in stage.named_parameters()}
    stage.zero_grad()
    store = WeightGradients()
    store.enter([stage])
    assert [name for name, module in stage.named_modules() if "forward" in vars(module)] == ["own", "by_keyword"]
    _with_split(step, [stage["own"].weight])
    assert all(same_bits(each.grad, wanted[name]) for name, each in stage.named_parameters())
    store.leave()
    assert not any("forward" in vars(module) for module in stage.modules())


def test_a_frozen_weight_is_left_alone() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    _with_split(lambda: linear(x, weight), [weight])
    assert x.grad is not None
    assert weight.grad is None


def test_nothing_is_kept_after_a_failure() -> None:
    store = WeightGradients()
    weight = nn.Parameter(torch.randn(8, 8))
    with store.put_off(CHUNK):
        linear(torch.randn(4, 8), weight).sum().backward()
    store.forget()
    with store.put_off(CHUNK):
        pass
    store.run(CHUNK)
    assert weight.grad is None


def test_a_backward_inside_the_forward_is_a_plain_one() -> None:
    """A step that lowtide observes runs forward and backward inside the first forward."""
    store = WeightGradients()
    x, weight = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    F.linear(x, weight).sum().backward()
    wanted = weight.grad
    weight.grad = None
    with store.forward(CHUNK):
        linear(x, weight).sum().backward()
    assert same_bits(weight.grad, wanted)
    store.run(CHUNK)
    assert same_bits(weight.grad, wanted)
