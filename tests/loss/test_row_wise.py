"""Modules that a user declares row-wise, wherever they stand: the bits of the declared sum, or a refusal by name."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lowtide
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from lowtide.loss.layers import layer_rows_of, take_layers_in_blocks
from tests.support.grid import in_turn
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

ROWS = 16
FATES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "recompute": {"recompute": "all", "layers": ["first", "tail"]},
    "swap": {"swap": "all", "min_bytes": 0},
}
MEMORY: dict[str, Any] = {"rows": ROWS, "row_wise": ["tail"], "loss": "plain"}


class Gated(nn.Module):
    """Two tensors in, two out, one of which is a number a row; the second one in may be there for one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(12, 40), nn.Linear(12, 40, bias=False), nn.Linear(40, 12)

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        inner = F.silu(self.gate(x)) * self.up(given)
        return self.down(inner), {"size": inner.square().mean(-1)}


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 3, bias=False), nn.Linear(3, 12, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + 2 * self.b(self.a(x))
        return made


class Picture(nn.Module):
    """What it is given has four dimensions, and it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 30), nn.Linear(30, 12)

    def forward(self, x: Tensor) -> Tensor:
        _, _, _, width = x.shape
        return x + self.down(F.gelu(self.up(self.norm(x)))).view(*x.shape[:3], width)


class Mixture(nn.Module):
    """Each row weighs four products of its own: a softmax, and a sum, but of no two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.parts = nn.Linear(12, 4), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return torch.stack([each(x) for each in self.parts], -1).mul(weights[..., None, :]).sum(-1)


class Summed(nn.Module):
    """Autograd gives one tensor as the gradient of both weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(12, 12)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b)


class Model(nn.Module):
    """`tail` stands in no list. `calls`: how often it is called; `shape`: of what it is given."""

    def __init__(self, tail: nn.Module, *, calls: int = 1, shape: tuple[int, ...] = (3, 17, 12)) -> None:
        super().__init__()
        self.calls, self.shape = calls, shape
        self.first, self.tail, self.last = nn.Linear(12, 12), tail, nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(self.calls):
            given = (h, h[:1].tanh()) if isinstance(self.tail, Gated) else (h,)
            h = self.tail(*given)
            h = h[0] + h[1]["size"][..., None] if isinstance(h, tuple) else h
        return self.last(h).square().mean()


KINDS: dict[str, Callable[[], Model]] = {
    "two in, two out": lambda: Model(Gated()),
    "called twice": lambda: Model(nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 12)), calls=2),
    "one sequence": lambda: Model(nn.Linear(12, 12), shape=(50, 12)),
    "four dimensions": lambda: Model(Picture(), shape=(2, 5, 6, 12)),
    "no weights": lambda: Model(nn.GELU()),
    "a norm": lambda: Model(nn.RMSNorm(12)),
    "a mixture": lambda: Model(Mixture()),
    "a sum of weights": lambda: Model(Summed()),
    "lora": lambda: Model(Lora()),
    "parametrized": lambda: Model(parametrizations.weight_norm(nn.Linear(12, 12))),
    "bf16": lambda: Model(Picture(), shape=(1, 2, 40, 12)).to(torch.bfloat16),
}


class _InParts(nn.Module):
    """The declared sum, by plain PyTorch: each block has weights of its own."""

    def __init__(self, tail: nn.Module, parts: list[nn.Module]) -> None:
        super().__init__()
        self.tail, self.parts = tail, parts

    def forward(self, *given: Tensor) -> Any:
        lead, ones = given[0].shape[:-1], (1,) * (given[0].ndim - 2)
        rows = [each.expand(*lead, each.shape[-1]).reshape(*ones, -1, each.shape[-1]) for each in given]
        blocks = [each.split(ROWS, -2) for each in rows]
        mine = [copy.deepcopy(self.tail) for _ in blocks[0]]
        self.parts += mine
        made = [one(*block) for one, block in zip(mine, zip(*blocks), strict=True)]
        if isinstance(made[0], Tensor):
            return torch.cat(made, -2).view(*lead, -1)
        sizes = torch.cat([each[1]["size"] for each in made], -1).view(lead)
        return torch.cat([each[0] for each in made], -2).view(*lead, -1), {"size": sizes}


def declared(model: Model, x: Tensor) -> list[Any]:
    """Loss and gradients of the declared sum."""
    model, parts = copy.deepcopy(model), []
    tail = model.tail
    model.tail = _InParts(tail, parts)
    if isinstance(tail, Gated):
        model.tail.__class__ = type("_Both", (_InParts, Gated), {})
    loss = model(x)
    loss.backward()
    num_blocks = len(parts) // model.calls
    calls = [parts[start : start + num_blocks] for start in range(0, len(parts), num_blocks)]
    for name, weight in tail.named_parameters():
        for call in reversed(calls):  # the last call's gradient is there first
            blocks = [part.get_parameter(name).grad for part in call]
            if blocks[0] is not None:
                total = sum((each.float() for each in blocks[1:]), blocks[0].float()).to(weight.dtype)  # type: ignore[union-attr]
                weight.grad = total if weight.grad is None else weight.grad + total
    return [
        loss.detach(),
        *(model.first.weight.grad, model.last.weight.grad),
        *(each.grad for each in tail.parameters()),
    ]


def _step(model: Model, x: Tensor) -> list[Any]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    weights = (model.first.weight, model.last.weight, *model.tail.parameters())
    return [loss.detach(), *(None if each.grad is None else each.grad.clone() for each in weights)]


def _assert_same(want: list[Any], got: list[Any]) -> None:
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        assert (a is b) if a is None or b is None else same_bits(a, b), number


def _made(kind: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model = KINDS[kind]()
    return model, torch.randn(*model.shape).to(model.last.weight.dtype)


@pytest.mark.parametrize(("kind", "fates"), in_turn(1, KINDS, FATES))
def test_the_declared_sum_under_every_plan(kind: str, fates: str) -> None:
    model, x = _made(kind)
    want = declared(model, x)
    with lowtide.apply(model, {**MEMORY, **FATES[fates]}, engine=virtual(3)) as tide:
        assert tide.plan.row_wise == ("tail",) and tide.plan.layer_rows == ROWS
        for _ in range(2):
            _assert_same(want, _step(model, x))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_one_block_is_the_plain_step(kind: str) -> None:
    model, x = _made(kind)
    want = _step(model, x)
    with lowtide.apply(model, MEMORY | {"rows": 100}):
        _assert_same(want, _step(model, x))


def test_no_budget_changes_a_bit_and_the_names_travel() -> None:
    model, x = _made("two in, two out")
    want = declared(model, x)
    for budget in ("24KiB", "10MiB"):
        memory = {**MEMORY, "min_bytes": 0}
        with lowtide.optimize(model, budget=budget, memory=memory, engine=virtual(3)) as tide:
            for _ in range(3):
                _assert_same(want, _step(model, x))
            assert tide.plan is not None and tide.plan.row_wise == ("tail",)
            assert "tail: in blocks of 16 rows but for attention, as declared" in str(tide.plan)
            assert lowtide.Plan.from_json(tide.plan.to_json()) == tide.plan
            assert dataclasses.replace(tide.plan, row_wise=("last",)).digest() != tide.plan.digest()


def test_a_traced_plan_has_the_names_and_carries_them_out() -> None:
    model, x = _made("called twice")
    want = declared(model, x)
    plan = lowtide.plan(model, (x,), budget="1MiB", memory={**MEMORY, **FATES["swap"]}, hardware="h200")
    assert plan.row_wise == ("tail",) and any(site.fate is Fate.SWAP for site in plan.sites)
    with lowtide.apply(model, plan, engine=virtual(3)):
        _assert_same(want, _step(model, x))


def test_patterns_name_the_outermost_modules_in_lists_and_outside() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Picture(), "act": nn.GELU()}) for _ in range(2))
            self.tail = nn.Linear(12, 12)

    model = Stack()
    put_back = take_layers_in_blocks(model, 16, ["blocks.*.mlp", "mlp.up", "tail"])
    taken = [name for name, each in model.named_modules() if "forward" in vars(each)]
    assert taken == ["blocks.0.mlp", "blocks.1.mlp", "tail"]
    put_back()
    assert layer_rows_of(model) == (None, ())


class _Talks(nn.Module):
    def __init__(self, talk: Callable[..., Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        self.talk, self.part, self.weight = talk, part, nn.Parameter(torch.eye(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.talk(x @ self.weight, *([] if self.part is None else [self.part]))


def _attention(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


def _routed(x: Tensor) -> Tensor:
    """Each of three experts takes those four rows that want it most."""
    best = x[..., :3].topk(4, -2).indices
    return x.scatter_add(-2, best[..., :1].expand(*best.shape[:-1], 12), x[..., :4, :])


def _by_channels(x: Tensor, part: nn.Module) -> Tensor:
    made: Tensor = part(x.mT).mT
    return made


TALKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: _Talks(_by_channels, nn.BatchNorm1d(12)),
    "group norm": lambda: _Talks(_by_channels, nn.GroupNorm(3, 12)),
    "softmax over rows": lambda: _Talks(lambda x: x.softmax(-2)),
    "cumsum": lambda: _Talks(lambda x: x.cumsum(-2)),
    "attention": lambda: _Talks(_attention),
    "routing": lambda: _Talks(_routed),
    "conv": lambda: _Talks(_by_channels, nn.Conv1d(12, 12, 3, padding=1)),
    "the row before": lambda: _Talks(lambda x: x.roll(1, -2)),
    "sorted": lambda: _Talks(lambda x: x.sort(-2).values),
    "the mean": lambda: _Talks(lambda x: x - x.mean(-2, keepdim=True)),
    "all of it flat": lambda: _Talks(lambda x: x.flatten().roll(1).view_as(x)),
    "recurrent": lambda: _Talks(lambda x, part: part(x)[0], nn.GRU(12, 12, batch_first=True)),
}
_HEAD, _END = (
    "memory.rows: 'tail' cannot be taken in blocks of rows: ",
    "; leave memory.rows out, or name what it may take with memory.row_wise",
)


def _refused(model: nn.Module, run: Callable[[], Any], memory: dict[str, Any] = MEMORY) -> str:
    def step() -> None:
        with lowtide.apply(model, memory):
            run()

    with pytest.raises(ConfigError) as caught:
        step()
    text = str(caught.value)
    assert text.startswith(_HEAD) and text.endswith(_END), text
    return text[len(_HEAD) : -len(_END)]


@pytest.mark.parametrize("kind", TALKS)
def test_rows_that_talk_are_named_on_real_tensors_and_without_a_device(kind: str) -> None:
    torch.manual_seed(0)
    model = Model(TALKS[kind]())
    x, before = torch.randn(*model.shape), copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError) as caught:
        lowtide.plan(model, (x,), budget="1GiB", memory=MEMORY, hardware="h200")
    assert str(caught.value).startswith(_HEAD), caught.value
    _refused(model, lambda: model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_alone_are_taken_without_a_device(kind: str) -> None:
    model, x = _made(kind)
    plan = lowtide.plan(model, (x,), budget="1GiB", memory=MEMORY, hardware="h200")
    assert plan.row_wise == ("tail",) and plan.layer_rows == ROWS


def _counts(x: Tensor, part: Any) -> Tensor:
    part.steps += 1
    return x


def _buffer(x: Tensor, part: Any) -> Tensor:
    part.total.add_(1)
    return x


def _with(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (lambda: _Talks(_counts, _with(nn.Identity(), steps=0)), "each run of it changes"),
        (lambda: _Talks(_buffer, _with(nn.Identity(), total=torch.zeros(3))), "each run of it changes"),
        (lambda: nn.ReLU(inplace=True), "it writes to what it is given"),
        (lambda: nn.Dropout(0.3), "it drops out at random (p = 0.3)"),
        (lambda: _Talks(lambda x: x * torch.rand_like(x)), "what it gives for a row depends on other rows"),
        (lambda: _Talks(lambda x: x.mean()), "it gives a tensor of shape (), which has no row for each token"),
        (lambda: _Talks(lambda x: (x, 3)), "it gives a int"),  # type: ignore[arg-type, return-value]
        (
            lambda: _Talks(lambda x: x.view(3, 17, 12)),
            "with a few of its rows alone it raises RuntimeError: shape '[3, 17, 12]' is invalid for input of size 96",
        ),
    ],
)
def test_what_cannot_run_again_or_alone_is_named(tail: Callable[[], nn.Module], text: str) -> None:
    model = Model(tail())
    x = torch.randn(*model.shape)
    assert _refused(model, lambda: model(x)).startswith(text)
    part: Any = getattr(model.tail, "part", None)
    assert not getattr(part, "steps", 0) and not getattr(part, "total", torch.zeros(1)).any()


def test_what_is_not_there() -> None:
    model = Model(nn.Linear(12, 12))
    for names, text in (
        (["tial"], "memory.row_wise: 'tial' is no module of Model"),
        (["a..b"], "memory.row_wise: pattern 'a..b': "),
    ):
        with pytest.raises(ConfigError) as caught:
            lowtide.apply(model, MEMORY | {"row_wise": names})
        assert str(caught.value).startswith(text)
    with pytest.raises(ConfigError, match=r"^memory\.row_wise: needs the number of rows of a block; write e\.g\. rows"):
        lowtide.apply(model, {"row_wise": ["tail"]})


def test_rows_that_talk_from_a_later_step_on_are_named() -> None:
    """In eval, a batch norm knows no other rows."""
    model = Model(_Talks(_by_channels, nn.BatchNorm1d(12)))
    x = torch.randn(*model.shape)
    with lowtide.apply(model.eval(), MEMORY):
        model(x).backward()
        with torch.no_grad():
            model.train()(x)
        with pytest.raises(ConfigError, match="cannot be taken in blocks of rows"):
            model(x)


def test_hooks_of_the_module_itself_see_the_whole() -> None:
    model, x = _made("lora")
    seen: list[Any] = []
    model.tail.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    model.tail.register_forward_hook(lambda _, given, made: seen.append(made.shape))
    model.tail.register_full_backward_hook(lambda _, of_given, of_made: seen.append(of_made[0].shape))
    want = declared(model, x)
    seen.clear()
    with lowtide.apply(model, MEMORY):
        _assert_same(want, _step(model, x))
    assert seen == 3 * [model.shape]


@pytest.mark.parametrize("add", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_of_its_parts_are_named(add: str) -> None:
    model, x = _made("lora")
    getattr(model.tail.a, add)(lambda *_: None)
    assert _refused(model, lambda: model(x)) == "there are hooks on its parts, which would see blocks"


def test_weights_that_two_declared_modules_share() -> None:
    """Each has its sum, and autograd adds them up."""
    model, x = _made("lora")
    twice = _made("lora")[0]
    twice.calls = 2
    model.last = nn.Sequential(copy.copy(model.tail), model.last)  # type: ignore[assignment]
    want = declared(twice, x)
    with lowtide.apply(model, MEMORY | {"row_wise": ["tail", "last.0"]}):
        model.zero_grad()
        model(x).backward()
    assert same_bits(model.tail.b.weight.grad, want[-1])


def test_weights_that_a_call_is_given() -> None:
    model, x = _made("two in, two out")
    given = {name: each.detach().mul(1.5).requires_grad_() for name, each in model.named_parameters()}
    other = copy.deepcopy(model)
    other.load_state_dict({name: each.detach() for name, each in given.items()})
    want = declared(other, x)
    with lowtide.apply(model, MEMORY):
        torch.func.functional_call(model, given, (x,)).backward()
    got = [given[name].grad for name in ("first.weight", "last.weight")]
    got += [given[f"tail.{name}"].grad for name, _ in model.tail.named_parameters()]
    _assert_same(want[1:], got)


def test_several_backward_passes() -> None:
    model, x = _made("two in, two out")
    want = declared(model, x)
    with lowtide.apply(model, MEMORY):
        model.zero_grad()
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        weights = (model.first.weight, model.last.weight, *model.tail.parameters())
        _assert_same([each + each for each in want[1:]], [each.grad for each in weights])
        with pytest.raises(RuntimeError, match="a second derivative"):
            torch.autograd.grad(model(x), list(model.parameters()), create_graph=True)


def test_under_autocast() -> None:
    model, x = _made("two in, two out")
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        want = declared(model, x)
        with lowtide.apply(model, MEMORY):
            _assert_same(want, _step(model, x))


def test_transforms_are_named() -> None:
    model, x = _made("lora")
    text = "torch.func and forward-mode derivatives are not covered"
    assert _refused(model, lambda: torch.func.grad(model)(x)) == text


@pytest.mark.parametrize("compiles", [lambda tail: tail.up.compile(), lambda tail: tail.compile()])
def test_compiled_parts_are_named(compiles: Callable[[Any], None]) -> None:
    model, x = _made("two in, two out")
    compiles(model.tail)
    assert _refused(model, lambda: model(x)) == "a part of it is compiled"


def test_without_gradients_it_is_the_models_own_forward() -> None:
    model, x = _made("two in, two out")
    with torch.no_grad():
        want = model(x)
        with lowtide.apply(model, MEMORY):
            assert same_bits(want, model(x))


@pytest.mark.parametrize("kind", ["two in, two out", "called twice"])
def test_a_graph_holds_what_it_was_given_by_what_it_saved_alone(kind: str) -> None:
    """Else a plan could send nothing of it away."""
    model, x = _made(kind)
    given: list[Any] = []
    model.tail.register_forward_pre_hook(lambda _, inputs: given.append(weakref.ref(inputs[0].untyped_storage())))
    take_layers_in_blocks(model, ROWS, ["tail"])
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (each.shape, each.dtype), lambda _: None):  # type: ignore[arg-type, return-value]
        loss = model(x)
    gc.collect()
    assert loss.grad_fn is not None and [storage() for storage in given] == [None] * model.calls


def test_a_checkpoint_around_it_and_in_it() -> None:
    model, x = _made("two in, two out")
    want = declared(model, x)
    forward = model.forward
    model.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    with lowtide.apply(model, MEMORY):
        _assert_same(want, _step(model, x))
