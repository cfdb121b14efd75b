"""The recorder: who made which storage, and what is a parameter in disguise."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.errors import ConfigError
from lowtide.profiling.producer_names import Recorder, op_name
from lowtide.tensors.kinds import storage_keys


def key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("packet", "name"),
    [
        ("mul", "mul"),
        ("add_", "add"),
        ("_softmax", "softmax"),
        ("_to_copy", "to"),
        ("_scaled_dot_product_flash_attention_for_cpu", "sdpa"),
        ("_scaled_dot_product_efficient_attention", "sdpa"),
        ("native_layer_norm", "layer_norm"),
        ("convolution", "conv"),
    ],
)
def test_operators_have_plain_names(packet: str, name: str) -> None:
    assert op_name(packet) == name


def test_a_storage_is_named_by_its_module_and_its_operator() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.SiLU()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first = x * 2
            second = first * 3
            return first, second, self.act(second), second.view(-1).exp_()

    model = nn.Module()
    model.block = Block()
    recorder, x = Recorder(set()), torch.ones(4)
    with recorder.following(model.block, "block"), recorder:
        first, second, active, _ = model.block(x)
    assert recorder.names[key(first)] == "block.mul"
    assert recorder.names[key(active)] == "block.act.silu"
    # Written in place through a view: the last operator that wrote it made what is saved.
    assert recorder.names[key(second)] == "block.exp"
    assert recorder.seen_ops == {"block.mul", "block.act.silu", "block.exp"}
    assert not model.block._forward_pre_hooks
    assert not model.block.act._forward_hooks


class Slow(nn.Module):
    """Its forward begins, and ends when somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def forward(self, x: None) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)


class Beside(nn.Module):
    """While it runs, another thread is inside of one of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.product = Slow(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=self.slow, args=(None,))
        other.start()
        assert self.slow.has_begun.wait(60)
        x = self.product(x).tanh()
        self.slow.may_end.set()
        other.join(60)
        return x.exp().sum()


def test_a_module_that_another_thread_runs_names_nothing() -> None:
    model = Beside()
    recorder, x = Recorder(set()), torch.ones(2, 4)
    with recorder.following(model), recorder:
        model(x)
    assert {name for name in recorder.seen_ops if not name.endswith(".t")} == {"product.addmm", "tanh", "exp", "sum"}


def test_nor_in_an_observed_step() -> None:
    profile = lowtide.observe(Beside(), (torch.ones(2, 4),))
    forward = profile.op_names[: profile.num_forward_ops]
    assert [name for name in forward if not name.endswith(".t")] == ["product.addmm", "tanh", "exp", "sum"]


def test_hooks_are_gone_after_an_exception() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(set())
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"), recorder.following(model), recorder:
        model(torch.ones(3, 3))
    assert not model[0]._forward_pre_hooks
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("is_frozen", [False, True])
def test_views_and_casts_of_parameters_are_parameters(is_frozen: bool) -> None:
    layer = nn.Linear(4, 4).requires_grad_(not is_frozen)
    recorder = Recorder(storage_keys(layer))
    x = torch.ones(2, 4)
    with recorder:
        transposed = layer.weight.t()
        cast = layer.weight.to(torch.bfloat16)
        cast_view = cast.t()
        product = x @ layer.weight
        mixed = torch.cat([x, layer.weight])
    assert {key(transposed), key(cast), key(cast_view)} <= recorder.parameter_keys
    assert not {key(product), key(mixed), key(x)} & recorder.parameter_keys


def test_autocast_copies_of_parameters_are_parameters() -> None:
    layer = nn.Linear(4, 4)
    recorder = Recorder(storage_keys(layer))
    saved: list[torch.Tensor] = []
    with (
        recorder,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        layer(torch.ones(2, 4, requires_grad=True))
    weights = [t for t in saved if t.shape == (4, 4)]
    assert weights
    assert all(key(t) in recorder.parameter_keys for t in weights)


@pytest.mark.parametrize("name", ["pinv", "lstsq"])
def test_an_operator_that_gives_other_numbers_under_a_mode_is_refused_by_name(name: str) -> None:
    """torch 2.13. When this fails because the numbers are the same, torch is mended and the refusal can go."""

    def run(matrix: torch.Tensor) -> torch.Tensor:
        if name == "pinv":
            return torch.linalg.pinv(matrix)
        return torch.linalg.lstsq(matrix, matrix.cos(), driver="gels").residuals

    given = torch.randn(6, 4, dtype=torch.complex64)

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Watcher():
        misled = run(given)
    assert not torch.equal(misled, run(given))
    with pytest.raises(ConfigError) as error, Recorder(set()):
        run(given)
    assert str(error.value) == (
        f"lowtide: torch.linalg.{name} of complex numbers gives other numbers while PyTorch lets somebody watch the "
        "operators, as lowtide does in the first forward pass; keep that part out of the model that is given to lowtide"
    )
    with Recorder(set()):
        watched = run(given.real)
    assert torch.equal(watched, run(given.real))
