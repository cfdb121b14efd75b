"""Compiled models, in every form and at every time, are refused with one line; lowtide's own code is never compiled."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

END = "and compiled code has no eager forward to follow; "
BEFORE = END + "give lowtide the model before it is compiled"
AFTER = (
    "lowtide: Net is under a lowtide plan and was compiled after that (torch.compile), "
    + END
    + "call the model itself, or remove() the tide first"
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head: Any = nn.Linear(8, 8)
        self.function: Callable[[Tensor], Tensor] = torch.sin

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.function(x)).square().sum()


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def _compiled(thing: Any) -> Any:
    return torch.compile(thing, backend="eager")


class Decorated(Net):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _set(name: str) -> Callable[[Net], Net]:
    def change(net: Net) -> Net:
        setattr(net, name, _compiled(getattr(net, name)))
        return net

    return change


def _layer(net: Net) -> Net:
    net.layers[1] = _compiled(net.layers[1])
    return net


def _in_place(net: Net) -> Net:
    net.compile(backend="eager")
    return net


def _layer_in_place(net: Net) -> Net:
    net.layers[1].compile(backend="eager")
    return net


def _jit(net: Net) -> Net:
    net.head = torch.jit.script(Scripted())
    return net


FORMS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "model": (_compiled, "this model is compiled (torch.compile(module))"),
    "in place": (_in_place, "this model is compiled (module.compile())"),
    "layer": (_layer, "its module 'layers.1' is compiled (torch.compile(module))"),
    "layer in place": (_layer_in_place, "its module 'layers.1' is compiled (module.compile())"),
    "forward": (_set("forward"), "this model is compiled (torch.compile in its attribute 'forward')"),
    "function": (_set("function"), "this model is compiled (torch.compile in its attribute 'function')"),
    "class": (lambda _: Decorated(), "this model is compiled (torch.compile on its class's forward)"),
    "jit": (_jit, "its module 'head' is compiled (torch.jit)"),
}

CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "optimize": (lambda net: lowtide.optimize(net, budget="1GiB", engine="virtual:1"), "lowtide.optimize"),
    "apply": (lambda net: lowtide.apply(net, {"swap": "all", "min_bytes": 0}, engine="virtual:1"), "lowtide.apply"),
    "follow": (lambda net: lowtide.apply(net, {"recompute_config": {"recompute": True}}), "lowtide.apply"),
    "plan": (lambda net: lowtide.plan(net, (torch.ones(4, 8),), budget="1GiB"), "lowtide.plan"),
    "observe": (lambda net: lowtide.observe(net, (torch.ones(4, 8),)), "observe"),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_compiled_is_refused_by_name(form: str) -> None:
    compile_it, what = FORMS[form]
    net = compile_it(Net())
    for call, where in CALLS.values():
        with pytest.raises(lowtide.ConfigError) as caught:
            call(net)
        assert str(caught.value) == f"{where}: {what}, {BEFORE}"


@pytest.mark.parametrize("call", ["optimize", "apply"])
@pytest.mark.parametrize("form", ["model", "in place", "layer", "layer in place", "forward"])
@pytest.mark.parametrize("has_run", [False, True], ids=["at once", "later"])
def test_what_is_compiled_afterwards_is_refused_in_its_first_call(call: str, form: str, has_run: bool) -> None:
    x, net = torch.ones(4, 8), Net()
    with CALLS[call][0](net), warnings.catch_warnings():
        warnings.simplefilter("error")
        if has_run:
            net(x).backward()
        twin = FORMS[form][0](net)
        with pytest.raises(lowtide.ConfigError) as caught:
            twin(x).backward()
        if "layer" not in form:
            assert str(caught.value) == AFTER
        assert str(caught.value).startswith("lowtide") or str(caught.value).startswith("observe: its module 'layers.1'")
        assert "\n" not in str(caught.value)
    # After `remove` it is a compiled model like any other.
    twin(x).backward()
    gc.collect()


@torch.compile(backend="aot_eager")
def _elsewhere(x: Tensor) -> Tensor:
    return torch.sin(x) * x.exp()


@pytest.mark.parametrize("call", ["optimize", "apply"])
def test_a_compiled_function_that_a_forward_finds_elsewhere(call: str) -> None:
    net = Net()
    net.function = lambda x: _elsewhere(x).sin()
    with CALLS[call][0](net), pytest.raises(lowtide.ConfigError) as caught:
        net(torch.ones(4, 8))
    assert str(caught.value) == (
        "lowtide: 'the model' runs compiled code (a function under torch.compile), "
        + END
        + "leave out the compiler there, or put it around the whole model without lowtide"
    )


def test_a_whole_graph_is_refused_in_the_same_words() -> None:
    net = Net()
    with CALLS["apply"][0](net), pytest.raises(lowtide.ConfigError) as caught:
        torch.compile(net, backend="eager", fullgraph=True)(torch.ones(4, 8))
    assert str(caught.value) == AFTER


def test_an_eager_model_beside_a_compiled_one_is_fine() -> None:
    net, other = Net(), _compiled(Net())
    x = torch.ones(4, 8)
    other(x).backward()
    with CALLS["apply"][0](net) as tide:
        for _ in range(2):
            other(x).backward()
            net(x).backward()
        assert tide.stats.num_divergences == 0
        assert tide.stats.swapped_bytes


class Uncompiled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_a_function_that_is_kept_from_the_compiler_is_no_compiled_one() -> None:
    model = nn.Sequential(Uncompiled(8, 8), Uncompiled(8, 8))
    x = torch.ones(4, 8)
    model(x).sum().backward()
    truth = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with lowtide.apply(model, {"swap": "all", "min_bytes": 1}, engine="virtual:0") as tide:
        model(x).sum().backward()
        assert tide.stats.swapped_bytes
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), truth, strict=True))
