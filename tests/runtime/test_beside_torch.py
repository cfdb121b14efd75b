"""What torch's own suites promise of checkpoints, saved tensors and split backwards holds beside lowtide.

Random models of what those suites are made of: checkpoints in checkpoints of both kinds and the composable one, with
and without a determinism check; modules with several inputs and outputs; functions with outputs that nobody uses,
integer outputs, and gradients that are views of what they saved; sorts and splits. Each is trained plain and under
plans, in one backward or in two (of inputs, then of weights, as zero-bubble schedules do), and gives the same bits.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from tests.support.grid import in_turn
from tests.support.virtual_engine import VirtualEngine

WIDTH = 8
PLANS: dict[str, dict[str, Any]] = {
    "swap": {"swap": "all", "min_bytes": 0},
    "recompute": {"recompute": "all", "layers": ["0", "1", "2"]},
    "both": {"recompute": "all", "swap": "all", "min_bytes": 0, "layers": ["0", "1", "2"]},
}


class _Linear(nn.Module):
    def __init__(self, r: Random) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(WIDTH, WIDTH), r.choice((0.0, 0.3))
        self.act = r.choice((torch.tanh, F.silu, torch.sigmoid))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.act(self.linear(x)), self.rate)


class _Checkpointed(nn.Module):
    """Its parts run in one checkpoint, in which there may be others."""

    def __init__(self, r: Random, depth: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(_block(r, depth + 1) for _ in range(2)))
        self.how: dict[str, Any] = {"use_reentrant": r.random() < 0.4}
        if not self.how["use_reentrant"]:
            self.how["determinism_check"] = r.choice(("default", "none"))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.parts, x, **self.how)


def _composable(r: Random, depth: int) -> nn.Module:
    made = composable_checkpoint(nn.Sequential(_Linear(r), _block(r, depth + 1)))
    made.is_composed = True
    return made


class _Several(nn.Module):
    """Several inputs and outputs, one of them not a tensor."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.pair, self.out = _Pair(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left, right, scale = self.pair(x, F.silu(x), scale=0.5)
        return self.out(left * right) * scale


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
        return torch.tanh(self.a(x) + y), self.b(y).exp(), scale


class _ManyOutputs(torch.autograd.Function):
    """Of its outputs one is used, one is not, one is integers, and one is what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exp, sin = x.exp(), x.sin()
        order = x.argsort(-1)
        ctx.save_for_backward(x, exp, order)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        return exp, sin, order, exp.mul(2)

    @staticmethod
    def backward(ctx: Any, of_exp: Tensor | None, of_sin: Tensor | None, _: Any, of_twice: Tensor | None) -> Tensor:
        x, exp, order = ctx.saved_tensors
        assert of_sin is None and of_exp is not None and of_twice is not None
        return (of_exp + 2 * of_twice) * exp + 0.0 * torch.zeros_like(x).scatter_(-1, order, 1.0)


class _GivesViews(torch.autograd.Function):
    """Its gradients are views of what it saved: whoever frees or reuses that memory too early changes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        both = torch.stack((x, x.cos()))
        ctx.save_for_backward(both, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        both, weight = ctx.saved_tensors
        return both[1], both[0].flatten(0, -2)[0].view_as(weight)


class _Functions(nn.Module):
    def __init__(self, r: Random) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        exp, _, order, twice = _ManyOutputs.apply(torch.tanh(self.linear(x)))
        made = _GivesViews.apply(exp + 0.1 * twice.gather(-1, order), self.weight)
        return torch.sigmoid(made)


class _Parts(nn.Module):
    """What comes back in several parts of one storage, and sorted."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, 2 * WIDTH), r.choice(("chunk", "unbind", "topk"))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.kind == "chunk":
            left, right = h.chunk(2, -1)
        elif self.kind == "unbind":
            left, right = h.unflatten(-1, (2, WIDTH)).unbind(-2)
        else:
            left, right = h.topk(WIDTH, -1).values, h.sort(-1).values[..., :WIDTH]
        return torch.tanh(left) * right.sigmoid()


def _block(r: Random, depth: int = 0) -> nn.Module:
    kinds: list[Any] = [_Linear, _Several, _Functions, _Parts]
    nested: list[Any] = [_Checkpointed, _composable]
    kind = r.choice(nested if r.random() < (0.6, 0.4, 0.0)[depth] else kinds)
    return kind(r, depth) if kind in nested else kind(r)


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    r = Random(seed)
    return nn.Sequential(*(_block(r) for _ in range(3)), nn.Linear(WIDTH, 1))


def _trained(model: nn.Module, seed: int, *, is_split: bool) -> list[Tensor]:
    """Losses, gradients of inputs and weights, and the random state, of three steps."""
    torch.manual_seed(seed + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Tensor] = []
    for _ in range(3):
        x = torch.randn(5, 3, WIDTH, requires_grad=True)
        loss = model(x).square().mean()
        seen.append(loss.detach().clone())
        parameters = list(model.parameters())
        if is_split:
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, found in zip(parameters, gradients):
                parameter.grad = found
        else:
            loss.backward()
            assert x.grad is not None
            gradient = x.grad
        del loss
        seen += [gradient, *(p.grad.clone() for p in parameters if p.grad is not None), torch.get_rng_state()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _knows_only_backward(model: nn.Module) -> bool:
    """torch's older checkpoints and its composable one can be run again once, and by `backward()`."""
    modules = list(model.modules())
    is_old = any(isinstance(module, _Checkpointed) and module.how["use_reentrant"] for module in modules)
    return is_old or any(hasattr(module, "is_composed") for module in modules)


@pytest.mark.parametrize(("plan", "first"), in_turn(2, PLANS, [0, 10]))
def test_random_models_of_checkpoints_and_functions_give_the_same_bits(plan: str, first: int) -> None:
    verdicts: Counter[str] = Counter()
    for seed in range(first, first + 10):
        truth = _model(seed)
        is_split = seed % 2 == 1 and not _knows_only_backward(truth)
        model, engine = copy.deepcopy(truth), VirtualEngine(seed)
        wanted = _trained(truth, seed, is_split=is_split)
        try:
            with lowtide.apply(model, PLANS[plan], engine=engine):
                got = _trained(model, seed, is_split=is_split)
        except RuntimeError as error:
            if not str(error).startswith("lowtide: "):
                raise
            verdicts["refused"] += 1
            continue
        assert len(got) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted)), f"seed {seed}"
        del got
        assert not engine.violations and engine.num_slots == 0, f"seed {seed}"
        verdicts["equal"] += 1
    assert verdicts["equal"] >= 9, verdicts


def _runs_of(model: nn.Module, plan: dict[str, Any] | None) -> Counter[str]:
    runs: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, args, name=name: runs.update([name]))
    if plan is None:
        _trained(model, 0, is_split=False)
    else:
        with lowtide.apply(model, plan, engine=VirtualEngine(0)):
            _trained(model, 0, is_split=False)
    return runs


def test_swapping_runs_no_checkpoint_more_often() -> None:
    for seed in range(6):
        assert _runs_of(_model(seed), PLANS["swap"]) == _runs_of(_model(seed), None)


def _program(seed: int) -> Any:
    """Products and functions in a row; some results are written to in place afterwards, whether it counts or not."""
    r = Random(seed)
    weights = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed + n)) for n in range(4)]
    steps = [(r.choice(("mm", "sigmoid", "cos")), r.random() < 0.2, r.random() < 0.3) for _ in range(6)]

    def run(x: Tensor) -> Tensor:
        for number, (kind, is_written, is_viewed) in enumerate(steps):
            made = x @ weights[number % 4] if kind == "mm" else getattr(torch, kind)(x)
            x = made * 0.5 + x
            if is_written:
                (made.view(-1) if is_viewed else made).mul_(2)
        return x.tanh()

    return run


def _contexts(held: Any, said: CheckpointPolicy, seed: int) -> Any:
    """A `context_fn` for a policy that holds the results of one operator: torch's, or lowtide's if it offloads."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return said if op is held else CheckpointPolicy.PREFER_RECOMPUTE

    if said is CheckpointPolicy.MUST_SAVE:
        return functools.partial(create_selective_checkpoint_contexts, policy)
    return lowtide.selective_offload(policy, nn.Linear(1, 1), min_bytes=1, engine=VirtualEngine(seed))


def test_versions_under_selective_checkpointing_are_those_of_torch() -> None:
    """What torch's contexts refuse because it was written to is refused, and all else has the same bits."""
    verdicts: Counter[str] = Counter()
    for seed in range(30):
        run, x = _program(seed), torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        held = Random(f"{seed} held").choice((torch.ops.aten.mm.default, torch.ops.aten.sigmoid.default))
        answers: list[Tensor | None] = []
        for said in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD):
            leaf = x.clone().requires_grad_()
            try:
                contexts = _contexts(held, said, seed)
                checkpoint(run, leaf, use_reentrant=False, context_fn=contexts).sum().backward()
                answers.append(leaf.grad)
            except RuntimeError as error:
                if "place" not in str(error) and "mutated" not in str(error):
                    raise
                answers.append(None)
        theirs, ours = answers
        assert (theirs is None) == (ours is None), f"seed {seed}: torch's {theirs is not None}, ours {ours is not None}"
        assert theirs is None or torch.equal(theirs, ours), f"seed {seed}"
        verdicts["refused" if theirs is None else "equal"] += 1
    assert verdicts["refused"] > 3 and verdicts["equal"] > 3, verdicts


class _TwoSides(nn.Module):
    """Two outputs, each computed by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).sin(), self.b(x).cos()


class _Products(TorchDispatchMode):
    """Counts the products that linear modules begin with."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.num += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="this torch has no such groups")
@pytest.mark.parametrize("is_group", [True, False])
def test_a_group_of_backward_passes_runs_a_layer_again_once(is_group: bool) -> None:
    model, x = nn.Sequential(_TwoSides()), torch.randn(3, WIDTH)
    twin = copy.deepcopy(model)
    left, right = twin(x)
    (left.sum() + right.sum()).backward()
    with lowtide.apply(model, {"recompute": "all", "layers": ["0"]}):
        for step in range(3):
            model.zero_grad()
            left, right = model(x)
            with torch.utils.checkpoint.GraphExecGroup() if is_group else nullcontext(), _Products() as products:
                left.sum().backward()
                right.sum().backward()
            assert step == 0 or products.num == (2 if is_group else 4)
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
