"""Models compiled as a whole, in every form and at every time, are refused with one line; lowtide's own code is never
compiled. (Compiled layers: test_compiled_layers.py.)"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from tests.support.virtual_engine import virtual

AFTER = (
    "lowtide: Net is under a lowtide plan and was compiled after that (torch.compile), and compiled code has no eager "
    "forward to follow; compile the layers of a model before lowtide gets it, or remove() the tide first"
)


def _whole(how: str) -> str:
    return (
        f"this model is compiled as a whole ({how}), and one compiled graph has no layers to decide about; give "
        "lowtide the model before that, with its layers compiled: `for layer in model.layers: layer.compile()`"
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
    "model": (_compiled, _whole("torch.compile(module)")),
    "in place": (_in_place, _whole("module.compile()")),
    "forward": (_set("forward"), _whole("torch.compile in its attribute 'forward'")),
    "class": (lambda _: Decorated(), _whole("torch.compile on its class's forward")),
    "layer": (_layer, ""),
    "layer in place": (_layer_in_place, ""),
    "function": (
        _set("function"),
        "this model has a compiled function (torch.compile in its attribute 'function'), which is no module that "
        "lowtide could follow; compile the module around it instead: module.compile()",
    ),
    "jit": (
        _jit,
        "its module 'head' is compiled (torch.jit), and compiled code has no eager forward to follow; give lowtide the "
        "model before it is compiled",
    ),
}

CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "optimize": (lambda net: lowtide.optimize(net, budget="1GiB", engine=virtual(1)), "lowtide.optimize"),
    "apply": (lambda net: lowtide.apply(net, {"swap": "all", "min_bytes": 0}, engine=virtual(1)), "lowtide.apply"),
    "follow": (lambda net: lowtide.apply(net, {"recompute_config": {"recompute": True}}), "lowtide.apply"),
    "plan": (lambda net: lowtide.plan(net, (torch.ones(4, 8),), budget="1GiB"), "lowtide.plan"),
    "observe": (lambda net: lowtide.observe(net, (torch.ones(4, 8),)), "observe"),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("form", [form for form, (_, what) in FORMS.items() if what])
def test_what_is_compiled_is_refused_by_name(form: str) -> None:
    compile_it, what = FORMS[form]
    net = compile_it(Net())
    for call, where in CALLS.values():
        with pytest.raises(lowtide.ConfigError) as caught:
            call(net)
        assert str(caught.value) == f"{where}: {what}"


@pytest.mark.parametrize("call", ["plan", "follow"])
def test_a_compiled_layer_is_refused_where_nothing_shows_what_it_saves(call: str) -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        CALLS[call][0](_layer(Net()))
    assert str(caught.value) == (
        f"{CALLS[call][1]}: its module 'layers.1' is compiled (torch.compile(module)), and compiled code has no eager "
        "forward to follow; give lowtide the model before it is compiled, or use lowtide.optimize, which runs a step"
    )


@pytest.mark.parametrize(
    ("call", "form"),
    [
        *(("optimize", form) for form in ("model", "in place", "forward")),
        *(("apply", form) for form in ("model", "in place", "layer", "layer in place", "forward")),
    ],
)
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
        assert str(caught.value) == (AFTER if "layer" not in form else AFTER.replace("Net", "Sequential"))
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
        "lowtide: 'the model' runs compiled code (a function under torch.compile) that is no module of its own; "
        "compile the module around it instead: module.compile()"
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
    with lowtide.apply(model, {"swap": "all", "min_bytes": 1}, engine=virtual(0)) as tide:
        model(x).sum().backward()
        assert tide.stats.swapped_bytes
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), truth, strict=True))


def test_a_compiled_module_that_fsdp2_shards_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = Net()
        fully_shard(net.layers[1], mesh=init_device_mesh("cpu", (1,)))
        net.layers[1].compile(backend="eager")
        for call in ("apply", "optimize"):
            with pytest.raises(lowtide.ConfigError) as caught:
                CALLS[call][0](net)
            assert str(caught.value) == (
                f"lowtide.{call}: 'layers.1' is compiled and sharded by FSDP2, which gathers its parameters inside of "
                "what is compiled; compile the modules inside of a sharded one instead"
            )
    finally:
        dist.destroy_process_group()
