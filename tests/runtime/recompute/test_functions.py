"""`autograd.Function`s that keep tensors on `ctx`, under recompute of their layer: plain bits, and nothing left."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import RecomputeRefusedError
from tests.support.independent_count import IndependentCount
from tests.support.virtual_engine import virtual

WIDTH, ROWS, NUM_LAYERS = 32, 64, 3
LAYERS = [f"layers.{index}" for index in range(NUM_LAYERS)]
PLAN = {"recompute": "all", "min_bytes": 0, "layers": LAYERS}


# -- three Functions ---------------------------------------------------------------------------------------------------


class Keeps(torch.autograd.Function):
    """A gated product, whose factors and their product are attributes, in several forms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.x = x
        ctx.parts = [gate.sigmoid(), {"silu": gate * gate.sigmoid()}]
        ctx.more = types.SimpleNamespace(scale=2.0, cube=(x**3,))
        return x * ctx.parts[1]["silu"] + ctx.more.cube[0] * ctx.more.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        sigmoid, rest = ctx.parts
        by_x = grad * rest["silu"] + grad * 3 * ctx.x**2 * ctx.more.scale
        return by_x, grad * ctx.x * (sigmoid + rest["silu"] * (1 - sigmoid))


class OwnGraph(torch.autograd.Function):
    """A module that has a graph of its own, which backward goes through."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.given = x.detach().requires_grad_()
            ctx.made = module(ctx.given)
        return ctx.made.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        ctx.made.backward(grad)
        return None, ctx.given.grad


class Experts(torch.autograd.Function):
    """MindSpeed's PipeExpert, in short: chunks of rows, a graph for each, and outputs whose memory is given back."""

    @staticmethod
    def forward(ctx: Any, experts: nn.ModuleList, x: Tensor) -> Tensor:
        ctx.inputs, ctx.outputs, results = [], [], []
        for chunk, expert in zip(x.chunk(len(experts)), experts, strict=True):
            given = chunk.detach().requires_grad_()
            with torch.enable_grad():
                output = expert(given)
            results.append(output.detach().clone())
            output.untyped_storage().resize_(0)
            ctx.inputs.append(given)
            ctx.outputs.append(output)
        return torch.cat(results)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        chunks = grad.chunk(len(ctx.outputs))
        for output, chunk in zip(reversed(ctx.outputs), reversed(chunks), strict=True):
            torch.autograd.backward(output, chunk)
        return None, torch.cat([given.grad for given in ctx.inputs])


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class KeepsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + Keeps.apply(self.up(h), self.gate(h))


class OwnGraphLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = _mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + OwnGraph.apply(self.mlp, self.norm(x))


class ExpertsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.norm = nn.ModuleList(_mlp() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + Experts.apply(self.experts, self.norm(x))


KINDS = [KeepsLayer, OwnGraphLayer, ExpertsLayer]


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.is_reentrant else layer(x)
        return x.square().mean()


def build(kind: Callable[[], nn.Module], model: Callable[..., nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return model([kind() for _ in range(NUM_LAYERS)])


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, num_steps: int = 3, step: Callable[[nn.Module, int], Tensor] | None = None) -> list[Tensor]:
    """Losses and gradients of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    torch.manual_seed(1)
    for seed in range(num_steps):
        optimizer.zero_grad()
        found.append((step or _step)(model, seed).detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, torch.get_rng_state(), *(b.clone() for b in model.buffers())]


def _step(model: nn.Module, seed: int) -> Tensor:
    loss = model(batch(seed))
    loss.backward()
    return loss


def assert_plain(kind: Callable[[], nn.Module], *, plan: Any = PLAN, taken: bool = True, **how: Any) -> Any:
    """Under `plan` the bits are plain's. `taken`: all that was kept on `ctx` went."""
    model = how.pop("model", Model)
    truth = train(build(kind, model), **how)
    planned = build(kind, model)
    with lowtide.apply(planned, plan, engine=virtual(0)) as tide:
        found = train(planned, **how)
        stats = tide.stats
    assert len(found) == len(truth)
    for index, (a, b) in enumerate(zip(found, truth, strict=True)):
        assert torch.equal(a, b), index
    assert not taken or stats.function_bytes == 0
    return stats


# -- bits and bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", [PLAN, {**PLAN, "swap": "all"}, {**PLAN, "recompute": ["layers.1"]}])
def test_bits_are_plain(kind: type[nn.Module], plan: dict) -> None:
    assert_plain(kind, plan=plan)


def bytes_left(model: nn.Module) -> int:
    """Beside its parameters and the batch, between forward and backward."""
    x = batch(0)
    with IndependentCount([*model.parameters(), x]) as count:
        before = count.now_bytes
        loss = model(x)
        gc.collect()
        left = count.now_bytes - before
        loss.backward()
    return left


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_left_are_those_of_a_reentrant_checkpoint(kind: type[nn.Module]) -> None:
    model = build(kind)
    plain = bytes_left(model)
    model.is_reentrant = True
    reentrant = bytes_left(model)
    model.is_reentrant = False
    with lowtide.apply(model, PLAN, engine=virtual(0)) as tide:
        first, later = bytes_left(model), bytes_left(model)
        recomputed = tide.stats.recomputed_bytes
    assert reentrant < 0.5 * plain
    assert first <= 1.1 * reentrant, (first, reentrant)
    assert later <= 1.1 * reentrant, (later, reentrant)
    assert recomputed >= 2 * (plain - later - NUM_LAYERS * ROWS * WIDTH * 4)


# -- habits ------------------------------------------------------------------------------------------------------------


class Dropped(KeepsLayer):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.3)), 0.2)


class Autocast(KeepsLayer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Normed(OwnGraphLayer):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.ReLU())
        self.norm = nn.BatchNorm1d(WIDTH)


class Frozen(ExpertsLayer):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.experts[0].requires_grad_(False)


class Twice(nn.Module):
    """Both Functions, each twice, with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = OwnGraphLayer(), KeepsLayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.outer(self.inner(x))))


class Pair(torch.autograd.Function):
    """Two outputs, of which one may be read by nobody; its output is an attribute, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.exp = x.exp()
        ctx.double = x * 2
        ctx.shape = x.shape
        return ctx.exp, ctx.double.clone()

    @staticmethod
    def backward(ctx: Any, by_exp: Tensor | None, by_double: Tensor | None) -> Tensor:
        grad = torch.zeros(ctx.shape)
        if by_exp is not None:
            grad = grad + by_exp * ctx.exp
        return grad if by_double is None else grad + by_double * ctx.double / ctx.double.abs().clamp(min=1)


class Several(nn.Module):
    """Several outputs, in a structure; the first layers' second one is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        first, second = Pair.apply(self.up(x).tanh())
        return {"x": first, "more": [second, (first * 2).detach()]}


class SeveralModel(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out = {}
        for layer in self.layers:
            out = layer(x)
            x = out["x"]
        return (x + out["more"][0]).square().mean()


class Viewed(KeepsLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2, -1, WIDTH)[:, ::2].transpose(0, 1).reshape(-1, WIDTH).repeat(2, 1)


class Added(KeepsLayer):
    """What it gives is written to by the next one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1).relu_()


class AddedModel(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).mul_(0.9).add_(0.1)
        return x.square().mean()


class Leaf(Model):
    """The first layer has the batch for its input, which needs no gradient; all results go into the loss."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return self.first(torch.stack(found).sum(0)).square().mean()


class SharedModel(Model):
    """One layer, called again and again, beside others with its weights; what it gives is read by all later ones."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        if hasattr(layers[0], "up"):
            layers[1].up.weight = layers[0].up.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = total = self.first(x)
        for layer in [*self.layers, *self.layers]:
            x = layer(x + total)
            total = total + x
        return total.square().mean()


@pytest.mark.parametrize("kind", [Dropped, Autocast, Normed, Frozen, Twice, Viewed, Added])
@pytest.mark.parametrize("model", [Model, Leaf, SharedModel])
def test_habits(kind: type[nn.Module], model: type[nn.Module]) -> None:
    if kind is Viewed and model is not Model:
        pytest.skip("its rows come in another order")
    assert_plain(kind, model=model)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_inputs_with_several_readers(kind: type[nn.Module]) -> None:
    """A reentrant checkpoint sums their gradients in another order."""
    assert_plain(kind, model=SharedModel)


def test_several_outputs_of_which_some_are_unused() -> None:
    assert_plain(Several, model=SeveralModel)


def test_what_comes_out_is_written_to() -> None:
    assert_plain(KeepsLayer, model=AddedModel)


def accumulated(model: nn.Module, seed: int) -> Tensor:
    """Three micro-batches, two of them in flight at once, and a batch with a gradient of its own."""
    loss = model(batch(seed))
    second = model(batch(seed + 100).requires_grad_())
    loss.backward()
    third = model(batch(seed + 200)[: ROWS // 2])
    third.backward()
    second.backward()
    return loss + second + third


def twice(model: nn.Module, seed: int) -> Tensor:
    """Two backward passes through one graph."""
    loss = model(batch(seed))
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    return loss


def dropped(model: nn.Module, seed: int) -> Tensor:
    """A graph that is let go."""
    model(batch(seed + 7))
    return _step(model, seed)


@pytest.mark.parametrize("kind", [KeepsLayer, ExpertsLayer, Dropped])
@pytest.mark.parametrize("step", [accumulated, dropped])
def test_steps(kind: type[nn.Module], step: Callable[[nn.Module, int], Tensor]) -> None:
    assert_plain(kind, step=step)


@pytest.mark.parametrize("kind", [KeepsLayer, Dropped, Several])
def test_two_backward_passes(kind: type[nn.Module]) -> None:
    assert_plain(kind, step=twice, model=SeveralModel if kind is Several else Model)


def partial(model: nn.Module, seed: int) -> Tensor:
    """Gradients of some parameters only, and of a result inside of the model."""
    found: list[Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda _m, _i, output: found.append(output))
    loss = model(batch(seed))
    handle.remove()
    wanted = [found[0], model.layers[2].up.weight, model.layers[0].gate.weight]
    by_wanted = torch.autograd.grad(loss, wanted, retain_graph=True)
    loss.backward()
    for weight, grad in zip(wanted[1:], by_wanted[1:], strict=True):
        weight.grad = weight.grad + grad
    return loss + by_wanted[0].sum()


def test_gradients_of_some_tensors() -> None:
    assert_plain(KeepsLayer, step=partial)


class Differentiable(torch.autograd.Function):
    """Its backward has a graph, through attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3 * ctx.x**2


class DifferentiableLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + Differentiable.apply(self.up(x))


def penalty(model: nn.Module, seed: int) -> Tensor:
    """The norm of a gradient is part of the loss."""
    x = batch(seed).requires_grad_()
    loss = model(x)
    (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
    total: Tensor = loss + by_x.square().sum()
    total.backward()
    return total


def test_a_gradient_of_a_gradient() -> None:
    assert_plain(DifferentiableLayer, step=penalty)


class Hooked(OwnGraphLayer):
    """Hooks on tensors inside, that change gradients; the graph is looked at."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h.register_hook(lambda grad: grad * 2)
        out = OwnGraph.apply(self.mlp, h)
        assert out.grad_fn is not None
        out.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        return x + out


def test_hooks_inside() -> None:
    assert_plain(Hooked)


class SetUp(torch.autograd.Function):
    """The newer way to write one, with a weight that is saved, and a tuple in a dictionary."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x.exp() * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, weight = inputs
        ctx.save_for_backward(weight)
        ctx.exp, ctx.inputs = x.exp(), {"x": (x, [weight])}

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return grad * ctx.exp * weight, (grad * ctx.inputs["x"][0].exp()).sum(0)


class SetUpLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + SetUp.apply(self.up(x).tanh(), self.weight)


class NestedLayer(nn.Module):
    """A Function inside of another one's own graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = KeepsLayer(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + OwnGraph.apply(self.inner, self.norm(x))


class CheckpointedLayer(nn.Module):
    """torch's checkpoints of both kinds inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = KeepsLayer(), OwnGraphLayer(), KeepsLayer()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.third, checkpoint(self.second, x, use_reentrant=True), use_reentrant=True)


class Writes(torch.autograd.Function):
    """Its backward writes to attributes, which a second backward pass reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.more = x * 1, [x.sin()]
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result = grad * 2 * ctx.x * ctx.more[0]
        ctx.x.mul_(1.5)
        ctx.more[0].add_(1)
        return result


class WritesLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Writes.apply(self.up(x))


@pytest.mark.parametrize("kind", [SetUpLayer, NestedLayer, CheckpointedLayer])
@pytest.mark.parametrize("step", [_step, accumulated])
def test_other_ways_to_write_one(kind: type[nn.Module], step: Callable[[nn.Module, int], Tensor]) -> None:
    assert_plain(kind, step=step)


def test_what_backward_writes_is_there_in_the_next_one() -> None:
    assert_plain(WritesLayer, step=twice)


# -- what is left, refused, or freed -----------------------------------------------------------------------------------


class Stashes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stash: list) -> Tensor:
        stash[:] = [x.exp()]
        ctx.stash = stash
        ctx.own = x.sin()
        return stash[0] * ctx.own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (exp,) = ctx.stash
        return grad * exp * (ctx.own + 1), None


class StashLayer(nn.Module):
    """The list on `ctx` is the module's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.stash: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return Stashes.apply(self.up(x), self.stash)


def test_a_list_that_others_hold_stays_and_is_counted() -> None:
    stats = assert_plain(StashLayer, taken=False)
    assert stats.function_bytes == 3 * NUM_LAYERS * ROWS * WIDTH * 4


class Through(torch.autograd.Function):
    """A graph of its own that goes on into the graph around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.made = (x * 2).exp()
        ctx.x = x
        return ctx.made.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.autograd.grad(ctx.made, ctx.x, grad)[0]


class ThroughLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + Through.apply(self.up(x).tanh())


def test_a_graph_that_goes_on_outside_stays_and_is_counted() -> None:
    stats = assert_plain(ThroughLayer, taken=False)
    assert stats.function_bytes == 3 * NUM_LAYERS * ROWS * WIDTH * 4


class KeepsOutput(torch.autograd.Function):
    """Its output is an attribute, which whoever writes to the output changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.exp = x.exp()
        return ctx.exp

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.exp


class KeepsOutputLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return KeepsOutput.apply(self.up(x).tanh())


class Scaled(Model):
    """It writes to what the last layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](self.first(x))).mul_(2).square().mean()


REFUSED = (
    "lowtide: the recomputed 'layers.1' (KeepsOutputLayer) cannot be run again: a KeepsOutputBackward keeps a tensor "
    "of shape [64, 32] on ctx that was written to in place after the module had run. Gradients of this step are not "
    "right: set them to zero before you go on. From the next step on its Functions keep what they have on ctx."
)


def test_what_was_written_to_is_refused_and_stays_in_the_next_step() -> None:
    truth, model = build(KeepsOutputLayer, Scaled), build(KeepsOutputLayer, Scaled)
    with lowtide.apply(model, {**PLAN, "recompute": LAYERS[:2]}, engine=virtual(0)):
        with pytest.raises(RecomputeRefusedError) as error:
            _step(model, 0)
        assert str(error.value) == REFUSED
        found = train(model)
    assert all(torch.equal(a, b) for a, b in zip(found, train(truth), strict=True))


def test_an_output_as_an_attribute() -> None:
    assert_plain(KeepsOutputLayer)


def test_a_gradient_of_a_gradient_through_an_output_is_refused_once() -> None:
    model = build(KeepsOutputLayer)
    with lowtide.apply(model, PLAN, engine=virtual(0)):
        for layer in reversed(LAYERS):
            with pytest.raises(RecomputeRefusedError, match=f"'{layer}' .* keeps its output on ctx, and its backward"):
                penalty(model, 0)
        model.zero_grad()
        found = train(model, step=penalty)
    truth = train(build(KeepsOutputLayer), step=penalty)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


class Buffered(torch.autograd.Function):
    """It keeps a buffer, which changes from call to call, and reads what it is by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        ctx.count, ctx.view, ctx.x = count, count.view(1), x
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2 * ctx.count + ctx.view * ctx.x, None


class BufferedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return Buffered.apply(self.up(x), self.count)


@pytest.mark.parametrize("step", [_step, accumulated])
def test_a_buffer_on_ctx_is_read_as_it_is_by_then(step: Callable[[nn.Module, int], Tensor]) -> None:
    assert_plain(BufferedLayer, step=step)


class Draws(torch.autograd.Function):
    """It remembers what it drew, from a generator that nobody can wind back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Callable[[], float]) -> Tensor:
        ctx.noise = torch.full_like(x, draw())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2 + ctx.noise, None


class DrawsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        numbers = (float(number) for number in range(1000))
        hidden = types.SimpleNamespace(next=numbers.__next__)
        self.__dict__["draw"] = lambda: hidden.next()  # noqa: PLW0108  by its name, so that nobody reaches it

    def forward(self, x: Tensor) -> Tensor:
        return Draws.apply(self.up(x), self.draw)


def test_other_values_in_the_second_run_are_refused() -> None:
    model = build(DrawsLayer)
    with (
        lowtide.apply(model, PLAN, engine=virtual(0)),
        pytest.raises(RecomputeRefusedError, match="one that a DrawsBackward keeps on ctx"),
    ):
        _step(model, 0)


@pytest.mark.parametrize("kind", [*KINDS, Several, KeepsOutputLayer])
def test_nothing_stays_after_a_step(kind: type[nn.Module]) -> None:
    """Also without a garbage collector."""
    model = build(kind, SeveralModel if kind is Several else Model)
    seen: list[weakref.ref] = []
    with lowtide.apply(model, PLAN, engine=virtual(0)):
        gc.collect()
        gc.disable()
        try:
            for seed in range(3):
                loss = model(batch(seed))
                pending = [loss.grad_fn]
                while pending:
                    node = pending.pop()
                    if isinstance(node, torch.autograd.function.BackwardCFunction):
                        seen.append(weakref.ref(node))
                    pending += [each for each, _ in node.next_functions if each is not None]
                del node, pending
                if seed != 1:
                    loss.backward()
                del loss
            assert seen
            assert all(ref() is None for ref in seen)
        finally:
            gc.enable()
