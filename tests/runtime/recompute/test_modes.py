"""A module runs again under the settings, and in the grad mode, in which it ran first; and it runs far enough."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.tensors.modes import Modes
from tests.support import zoo
from tests.support.virtual_engine import virtual

WIDTH = 8
LAYERS = ["layers.0", "layers.1"]
PLANS = {
    "layer": {"recompute": "all", "min_bytes": 0, "layers": LAYERS},
    "layer_swapped": {"recompute": "all", "swap": "all", "min_bytes": 0, "layers": LAYERS},
    "leaf": {"recompute": ["layers.*.act"], "min_bytes": 0, "layers": LAYERS},
    "leaf_swapped": {"recompute": ["layers.*.act"], "swap": "all", "min_bytes": 0, "layers": LAYERS},
}
every_plan = pytest.mark.parametrize("plan", PLANS)


class Block(nn.Module):
    """A linear layer, and one module without children whose output is saved."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)).square()


class Last(Block):
    """The module without children comes last."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


def gradients(
    block: Callable[[], nn.Module],
    memory: dict | None,
    around: Any = contextlib.nullcontext,
    around_backward: Any = contextlib.nullcontext,
) -> list[Tensor]:
    torch.manual_seed(0)
    model = zoo.Stack(block(), block())
    tide = None if memory is None else lowtide.apply(model, memory, engine=virtual(1))
    torch.manual_seed(1)
    found = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        with around():
            loss = model(x).float().square().mean()
        with around_backward():
            loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
        model.zero_grad(set_to_none=True)
    if tide is not None:
        tide.remove()
    return [*found, torch.get_rng_state()]


def assert_same(block: Callable[[], nn.Module], plan: str, *around: Any) -> None:
    """`around`: what the forward runs in, and what backward does."""
    want, got = gradients(block, None, *around), gradients(block, PLANS[plan], *around)
    assert all(map(zoo.same_bits, got, want))


# -- grad mode ---------------------------------------------------------------------------------------------------------


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if torch.is_grad_enabled() and x.requires_grad else x.sin()


class OutputOnly(nn.LSTM):
    """Without gradients, LSTM runs another kernel."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[None])[0][0]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x[None, None]
        return F.scaled_dot_product_attention(q, q, q)[0, 0]


@every_plan
@pytest.mark.parametrize("act", [Asks, lambda: OutputOnly(WIDTH, WIDTH), Attends])
@pytest.mark.parametrize("around_backward", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_module_runs_again_in_its_grad_mode(
    plan: str, act: Callable[[], nn.Module], around_backward: Callable[[], Any]
) -> None:
    assert_same(lambda: Block(act()), plan, contextlib.nullcontext, around_backward)


def test_the_graph_of_a_second_run_is_not_kept() -> None:
    """What it saves is gone at once; and it does not reach the hooks of a layer that is being run again around it."""
    seen: list[Any] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            seen.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2 + ctx.saved_tensors[0] * 0

    class Fresh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(x.clone())

    memory = {"recompute": ["layers.0.act"], "min_bytes": 0, "layers": LAYERS}
    model = zoo.Stack(Block(Fresh()), Block(nn.Tanh()))
    with lowtide.apply(model, memory, engine=virtual(1)):
        loss = model(torch.randn(4, WIDTH)).mean()
        model.layers[0].linear.weight.register_hook(lambda _: None)
        num_before = len(seen)
        loss.backward()
        assert len(seen) > num_before
    assert all(one.expired() for one in seen[num_before:])


class WritesAfter(Block):
    """Into what the module without children gave, before it is saved."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)).mul_(2).square()


@every_plan
def test_what_is_written_to_an_output_is_not_lost(plan: str) -> None:
    assert_same(lambda: WritesAfter(nn.SiLU()), plan)


class WritesBefore(Block):
    """Into its input, which nobody has saved."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x.add_(1))).square()


@pytest.mark.parametrize("plan", ["layer", "layer_swapped"])
def test_a_region_that_writes_into_its_input_may_run_three_times(plan: str) -> None:
    def in_place(memory: dict | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = zoo.Stack(Block(nn.Tanh()), WritesBefore(nn.Tanh()))
        with contextlib.nullcontext() if memory is None else lowtide.apply(model, memory, engine=virtual(1)):
            loss = model(torch.ones(4, WIDTH)).square().mean()
            for left in (2, 1, 0):
                loss.backward(retain_graph=bool(left))
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(zoo.same_bits, in_place(PLANS[plan]), in_place(None)))


def test_an_output_under_autocast_is_made_again_under_autocast() -> None:
    for plan in ("leaf", "leaf_swapped"):
        assert_same(lambda: Block(nn.Linear(WIDTH, WIDTH)), plan, lambda: torch.autocast("cpu", torch.bfloat16))


def test_what_a_second_run_makes_is_in_the_ledger() -> None:
    model = zoo.Stack(Block(nn.Tanh()), Block(nn.Tanh()))
    with lowtide.apply(model, PLANS["layer"], engine=virtual(1)) as tide:
        for _ in range(2):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            held_bytes = tide._scheduler.ledger.now_bytes
            tide._scheduler.ledger.restart_peak()
            loss.backward()
            # Of one layer: what tanh gives, which square saves too.
            assert tide._scheduler.ledger.peak_bytes == held_bytes + 4 * WIDTH * 4
            del loss
            assert tide._scheduler.ledger.now_bytes == 0


# -- kernels that fill what they saved ---------------------------------------------------------------------------------


@every_plan
@pytest.mark.parametrize("kind", [Block, Last])
@pytest.mark.parametrize("act", [nn.RReLU, lambda: nn.RReLU(inplace=True), nn.Dropout])
def test_noise_is_drawn_before_it_is_read(plan: str, kind: type[Block], act: Callable[[], nn.Module]) -> None:
    assert_same(lambda: kind(act()), plan)


class Additions(TorchDispatchMode):
    """Counts `x + 1`. What a model counts by itself is wound back after a second run."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.number += func is torch.ops.aten.add.Tensor and args[1] is ONE
        return func(*args, **(kwargs or {}))


ONE = 1


class Tail(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + ONE


class WithTail(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.linear(x.tanh())
        except Exception:  # some models fall back to another kernel
            y = x
        return self.act(y)


def test_a_layer_stops_after_what_is_needed() -> None:
    """The tail of a layer that saves nothing is not run again, once it was seen to give the same."""
    assert_same(lambda: WithTail(Tail()), "layer")
    model = zoo.Stack(WithTail(Tail()), WithTail(Tail()))
    with lowtide.apply(model, PLANS["layer"], engine=virtual(1)):
        model(torch.randn(4, WIDTH, requires_grad=True)).square().mean().backward()
        forward = Additions()
        with forward:
            loss = model(torch.randn(4, WIDTH, requires_grad=True)).square().mean()
            assert forward.number == 2
            loss.backward()
            assert forward.number == 2


# -- settings ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Thirds(nn.Module):
    """Its numbers depend on the default dtype, and on the number of threads."""

    def forward(self, x: Tensor) -> Tensor:
        thirds = torch.full((WIDTH,), 1.0) / 3
        return (x * thirds.to(x.dtype) * torch.get_num_threads() * thirds.element_size()).tanh()


class AsksForTheDevice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if torch.empty(0).device.type == "meta" else 3)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.linear else out


class Halves(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is torch.ops.aten.tanh.default else out


@every_plan
@pytest.mark.parametrize(
    ("act", "around"),
    [
        (Attends, lambda: sdpa_kernel(SDPBackend.MATH)),
        (Thirds, _double),
        (Thirds, _threads),
        (nn.Tanh, Doubles),
        (nn.Tanh, Halves),
        (nn.Tanh, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        (AsksForTheDevice, lambda: torch.device("meta")),
    ],
    ids=["attention", "dtype", "threads", "function_mode", "dispatch_mode", "autocast", "device"],
)
def test_a_forward_under_other_settings_than_its_backward(plan: str, act: Callable[[], nn.Module], around: Any) -> None:
    kernel_before = torch.backends.cuda.flash_sdp_enabled()
    # The loss of a forward with another default dtype has that dtype.
    assert_same(lambda: Block(act()), plan, around)
    assert (torch.get_default_dtype(), torch.backends.cuda.flash_sdp_enabled()) == (torch.float32, kernel_before)


def _setter(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (torch.use_deterministic_algorithms, True),
        (torch.set_float32_matmul_precision, "medium"),
        (torch.backends.cuda.enable_math_sdp, False),
        (torch.backends.mha.set_fastpath_enabled, False),
        (_setter(torch.backends.cudnn, "benchmark"), True),
        (_setter(torch.backends.mkldnn, "enabled"), False),
        (_setter(torch.backends.cuda.matmul, "allow_fp16_accumulation"), True),
        (_setter(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"), False),
    ],
    ids=["deterministic", "precision", "math", "fastpath", "benchmark", "mkldnn", "fp16_sums", "bf16_sums"],
)
def test_settings_are_put_back_and_back_again(change: Callable[[Any], None], other: Any) -> None:
    plain = Modes()
    with plain.again():
        change(other)
        changed = Modes()
        assert changed.values != plain.values
        with plain.again():
            assert Modes().values == plain.values
        assert Modes().values == changed.values
        change(not other if isinstance(other, bool) else "highest")


# -- inference mode ----------------------------------------------------------------------------------------------------


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("buffer", torch.ones(WIDTH))
            self.attribute = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.buffer + self.attribute).tanh()


@every_plan
def test_tensors_of_inference_mode(plan: str) -> None:
    class Takes(Block):
        def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
            with torch.inference_mode():
                offset = torch.full((WIDTH,), 0.5)
            return self.inner(x, offset)

        def inner(self, x: Tensor, offset: Tensor) -> Tensor:
            return self.act(self.linear(x) + offset).square()

    assert_same(lambda: Takes(Offsets()), plan)


@every_plan
def test_an_input_of_inference_mode(plan: str) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Adds(), Adds()])

        def forward(self, x: Tensor, offset: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, offset=offset)
            return x

    class Adds(Block):
        def __init__(self) -> None:
            super().__init__(nn.Tanh())

        def forward(self, x: Tensor, offset: Tensor) -> Tensor:
            return self.act(self.linear(x) + offset).square()

    def answer(memory: dict | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Gives()
        tide = None if memory is None else lowtide.apply(model, memory, engine=virtual(1))
        with torch.inference_mode():
            offset = torch.full((WIDTH,), 0.5)
        for step in range(2):
            model(torch.full((4, WIDTH), step + 1.0), offset).sum().backward()
        if tide is not None:
            tide.remove()
        return [p.grad for p in model.parameters()]

    assert all(map(zoo.same_bits, answer(PLANS[plan]), answer(None)))


def test_attributes_of_a_saved_parameter_are_lost_by_any_hook() -> None:
    """Documented as a limit: PyTorch makes a new tensor of what an unpack hook returns, whoever set the hook."""
    seen: list[bool] = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            seen.extend([hasattr(weight, "main_grad"), hasattr(ctx.weight, "main_grad")])
            return grad * weight, grad * x

    weight = nn.Parameter(torch.ones(WIDTH))
    weight.main_grad = torch.zeros(WIDTH)  # type: ignore[attr-defined]
    x = torch.ones(WIDTH, requires_grad=True)
    Reads.apply(x, weight).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = Reads.apply(x, weight)
    y.sum().backward()
    assert seen == [True, True, False, True]


class Tagged(Tensor):
    """A tensor with attributes."""


def tagged(tensor: Tensor, tag: int, *, is_plain: bool) -> Any:
    made: Any = tensor if is_plain else tensor.as_subclass(Tagged)
    made.tag = tag
    return made


class ReadsTag(nn.Module):
    """Goes by an attribute of its input, and sets one of its output."""

    def __init__(self, *, is_plain: bool) -> None:
        super().__init__()
        self.linear, self.is_plain = nn.Linear(WIDTH, WIDTH), is_plain

    def forward(self, x: Any) -> Tensor:
        tag = getattr(x, "tag", 0) + 5 * isinstance(x, Tagged)
        return tagged(torch.tanh(self.linear(x) * tag) * tag, tag + 1, is_plain=self.is_plain)


@pytest.mark.parametrize("is_plain", [True, False], ids=["tensor", "subclass"])
@pytest.mark.parametrize("plan", ["layer", "layer_swapped", "leaf", "leaf_swapped"])
def test_attributes_and_class_of_an_input_are_there_in_a_second_run(plan: str, is_plain: bool) -> None:
    def run(memory: dict | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = zoo.Stack(ReadsTag(is_plain=is_plain), ReadsTag(is_plain=is_plain))
        if memory is not None:
            lowtide.apply(model, memory, engine=virtual(1))
        found = []
        for _ in range(3):
            loss = model(tagged(torch.ones(4, WIDTH), 3, is_plain=is_plain)).square().sum()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return found

    memory = PLANS[plan] | ({"recompute": ["layers.*.linear"]} if "leaf" in plan else {})
    assert all(zoo.same_bits(*pair) for pair in zip(run(memory), run(None), strict=True))
