"""Layers in declared blocks: the bits of the declared sum, whatever else is chosen."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from lowtide.loss.layers import layer_rows_of, take_layers_in_blocks
from tests.loss.test_attach import MODELS
from tests.loss.test_head import FATES, _assert_same_steps, _step, _tokens
from tests.support.grid import in_turn
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

NAMES = ["llama", "llama-tied", "qwen2", "mistral", "granite-scaled"]


class Layer(nn.Module):
    """Somebody's own layer: attention and an MLP, both with norms."""

    def __init__(self, *, bias: bool = True, dropout: float = 0.0, num_keys: int = 4) -> None:
        super().__init__()
        self.num_keys = num_keys
        self.norm, self.norm2 = nn.LayerNorm(32), nn.RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 32 + 16 * num_keys, bias=bias), nn.Linear(32, 32, bias=bias)
        self.up, self.down = nn.Linear(32, 80, bias=bias), nn.Linear(80, 32, bias=bias)
        self.drop = nn.Dropout(dropout)

    def before(self, x: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 8))
        query, key, value = heads.split((4, self.num_keys, self.num_keys), -2)
        return (query * shift[..., None, None], key, value)

    def after(self, x: Tensor, made: Tensor) -> Tensor:
        x = x + self.out(made.flatten(-2))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        query, key, value = (each.transpose(-3, -2) for each in self.before(x, shift))
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.num_keys < 4)
        return self.after(x, made.transpose(-3, -2))


def declared(layer: Layer, x: Tensor, shift: Tensor, of_out: Tensor, rows: int) -> list[Tensor]:
    """The declared sum, by plain PyTorch: a block has weights of its own, whose gradients are added up in order."""
    x = x.detach().requires_grad_()
    flat, shifts = x.flatten(0, 1), shift.expand(x.shape[:2]).flatten()
    parts = [slice(start, start + rows) for start in range(0, len(flat), rows)]
    layers = [copy.deepcopy(layer) for _ in parts]
    given = [one.before(flat[part][None], shifts[part][None]) for one, part in zip(layers, parts, strict=True)]
    query, key, value = (torch.cat(each, 1).view(*x.shape[:2], -1, 8).transpose(1, 2) for each in zip(*given))
    made = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=layer.num_keys < 4)
    made = made.transpose(1, 2).flatten(0, 1)
    out = torch.cat([one.after(flat[part][None], made[part][None]) for one, part in zip(layers, parts, strict=True)], 1)
    out = out.view_as(x)
    out.backward(of_out)
    sums = []
    for name, weight in layer.named_parameters():
        blocks = [one.get_parameter(name).grad for one in layers]
        total = blocks[0].to(torch.promote_types(weight.dtype, torch.float32))  # type: ignore[union-attr]
        for block in blocks[1:]:
            total = total + block
        sums.append(total.to(weight.dtype))
    return [out.detach(), x.grad, *sums]  # type: ignore[list-item]


class Own(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        made: Tensor = self.layers[0](x, *more, **named)
        return made


def _numbers(dtype: torch.dtype, batch: int = 2, tokens: int = 75) -> tuple[Tensor, Tensor, Tensor]:
    x, of_out = (torch.randn(batch, tokens, 32).to(dtype) for _ in range(2))
    return x, torch.rand(1, tokens).to(dtype), of_out


def _ours(layer: Layer, x: Tensor, shift: Tensor, of_out: Tensor, rows: int) -> list[Tensor]:
    x, model = x.detach().requires_grad_(), Own(layer)
    layer.zero_grad()
    blocks = take_layers_in_blocks(model, rows)
    out = model(x, shift)
    out.backward(of_out)
    blocks()
    assert "forward" not in vars(layer)
    return [out.detach(), x.grad, *(each.grad for each in layer.parameters())]  # type: ignore[list-item]


def _differ(want: list[Tensor], got: list[Tensor]) -> list[int]:
    return [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not same_bits(a, b)]


@pytest.mark.parametrize(
    ("dtype", "rows"),
    in_turn(2, [torch.float32, torch.bfloat16, torch.float64], [2, 16, 64, 75, 100, 149, 150, 1000]),
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_declared_sum(rows: int, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer, numbers = Layer(bias=bias).to(dtype), _numbers(dtype)
    assert _differ(declared(layer, *numbers, rows), _ours(layer, *numbers, rows)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_keys", "tokens"), in_turn(3, [1, 2, 4], [75, 700, 2000]))
def test_groups_of_heads_have_the_bits_of_all_at_once(num_keys: int, dtype: torch.dtype, tokens: int) -> None:
    """Also where a kernel cuts rows in other tiles, and where its threads share heads."""
    torch.manual_seed(0)
    layer, numbers = Layer(num_keys=num_keys).to(dtype), _numbers(dtype, tokens=tokens)
    assert _differ(declared(layer, *numbers, 64), _ours(layer, *numbers, 64)) == []


def test_attention_comes_and_goes_by_groups_of_heads() -> None:
    """A layer with two heads of keys saves what attention read and gave in two groups."""
    model, (x, shift, _) = Own(Layer(num_keys=2)), _numbers(torch.float32)
    take_layers_in_blocks(model, 64)
    profile = lowtide.observe(model, lambda: model(x, shift).sum())
    made = [site for site in profile.sites if site.name.partition(":")[0].rpartition(".")[2].startswith("sdpa")]
    assert [site.nbytes for site in made] == 2 * [150 * 2 * 8 * 4, 150 * 2 * 4], [site.name for site in made]


def test_what_attention_has_read_is_gone_before_the_rest_of_the_layer() -> None:
    """Else query, key and value of all heads stand beside each block of the MLP, wherever they are swapped to."""
    model, (x, shift, _) = Own(Layer(num_keys=2)), _numbers(torch.float32)
    take_layers_in_blocks(model, 64)
    profile = lowtide.observe(model, lambda: model(x, shift).sum())
    names = profile.op_names[: profile.num_forward_ops]
    first, last = (number for number, name in enumerate(names) if name.startswith("layers.0.sdpa"))
    rest = next(number for number, name in enumerate(names) if number > last and name.startswith("layers.0.up."))
    heads = [node for node in profile.nodes if node.saved <= last and node.nbytes >= 150 * 8 * 4]
    read = [node.dies for node in heads if not node.name.startswith("layers.0.sdpa")]
    assert len(read) == 6 and max(read[:3]) < last and max(read) < rest, (read, first, last, rest)


@pytest.mark.parametrize("rows", [64, 1000])
def test_under_autocast(rows: int) -> None:
    layer, numbers = Layer(), _numbers(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert _differ(declared(layer, *numbers, rows), _ours(layer, *numbers, rows)) == []


@pytest.mark.parametrize("frozen", ["up", "qkv", "norm", "all but out"])
def test_frozen_weights_get_nothing_and_the_others_their_bits(frozen: str) -> None:
    layer, numbers = Layer(), _numbers(torch.float32)
    want = declared(layer, *numbers, 64)
    names = [name for name, _ in layer.named_parameters()]
    for name, weight in layer.named_parameters():
        is_out = name.startswith("out.")
        weight.requires_grad_(is_out if frozen == "all but out" else not name.startswith(frozen))
    got = _ours(layer, *numbers, 64)
    for name, a, b in zip(names, want[2:], got[2:], strict=True):
        if layer.get_parameter(name).requires_grad:
            assert same_bits(a, b)
        else:
            assert b is None
    assert same_bits(want[1], got[1])


def test_a_view_of_a_weight_is_no_foreign_tensor() -> None:
    layer, numbers = Layer(), _numbers(torch.float32)
    layer.drop.forward = lambda x: x * layer.up.weight.t()[0, :32]  # type: ignore[method-assign]
    want = _ours(layer, *numbers, 1000)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(want, _ours(layer, *numbers, 64), strict=True))


def test_hooks_of_weights_see_the_sum_once() -> None:
    layer, numbers, seen = Layer(), _numbers(torch.float32), []
    want = declared(layer, *numbers, 64)
    layer.up.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    layer.qkv.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))  # type: ignore[union-attr]
    assert _differ(want, _ours(layer, *numbers, 64)) == [] and len(seen) == 2


def test_a_weight_that_is_used_before_and_after_attention_has_both_gradients() -> None:
    torch.manual_seed(0)
    layer, numbers = Layer().double(), _numbers(torch.float64)
    layer.norm2.weight = layer.norm.weight
    want = _ours(layer, *numbers, 1000)
    assert all(torch.allclose(a, b) for a, b in zip(want, _ours(layer, *numbers, 64), strict=True))


class _Parallel(Layer):
    """The MLP reads what attention has read, as in Cohere's layers."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        given = self.norm(x)
        heads = self.qkv(given).unflatten(-1, (-1, 8)).split((4, self.num_keys, self.num_keys), -2)
        made = F.scaled_dot_product_attention(*(each.transpose(-3, -2) for each in heads), is_causal=True)
        return x + self.out(made.transpose(-3, -2).flatten(-2)) + self.down(F.gelu(self.up(given)))


def test_what_is_made_before_attention_and_read_after_it_gives_both_gradients() -> None:
    torch.manual_seed(0)
    layer, numbers = Layer().double(), _numbers(torch.float64)
    layer.__class__ = _Parallel
    layer.norm2 = nn.Identity()
    want = _ours(layer, *numbers, 1000)
    assert all(torch.allclose(a, b) for a, b in zip(want, _ours(layer, *numbers, 64), strict=True))


def test_a_number_is_for_all_rows() -> None:
    """Transformers' trainer gives each layer the number of words that are to be learnt."""
    (batch, _), model = _tokens(), MODELS["llama"]()
    with lowtide.apply(model, {"rows": 100}):
        want, got = (_step(model, {**batch, "num_items_in_batch": number}) for number in (3, torch.tensor(3)))
    _assert_same_steps(want, got)


@pytest.mark.parametrize(("name", "fates"), in_turn(4, NAMES, ["nothing", *FATES]))
def test_no_plan_changes_a_bit(name: str, fates: str) -> None:
    (batch, _), model = _tokens(), MODELS[name]()
    blocks = take_layers_in_blocks(model, 100)
    want = _step(model, batch)
    blocks()
    memory: dict[str, Any] = {"rows": 100, "loss": "plain", **({} if fates == "nothing" else FATES[fates])}
    with lowtide.apply(model, memory, engine=virtual(3)) as tide:
        assert tide.plan.layer_rows == 100
        for _ in range(2):
            _assert_same_steps(want, _step(model, batch))
    assert layer_rows_of(model) == (None, ()) and not any("forward" in vars(module) for module in model.modules())


@pytest.mark.filterwarnings("error:lowtide. the first forward was not the one")
def test_no_budget_changes_a_bit() -> None:
    (batch, _), model = _tokens(), MODELS["llama"]()
    with lowtide.apply(model, {"rows": 100}):
        want = _step(model, batch)
    for budget in ("600KiB", "10MiB"):
        with lowtide.optimize(model, budget=budget, memory={"min_bytes": 0, "rows": 100}, engine=virtual(3)) as tide:
            for _ in range(3):
                _assert_same_steps(want, _step(model, batch))
            assert tide.plan is not None and tide.plan.layer_rows == tide.plan.loss_rows == 100
            assert "layers: in blocks of 100 rows but for attention, as declared" in str(tide.plan)
            assert lowtide.Plan.from_json(tide.plan.to_json()) == tide.plan


# The seventh takes a sixth of the time of the first: it plans for no budget.
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n == 7 else [pytest.mark.extended]) for n in range(1000)])
def test_random_draws_have_the_bits_of_the_declared_rows_alone(seed: int) -> None:
    draw = random.Random(seed)
    name, dtype = draw.choice(NAMES), draw.choice([torch.float32, torch.bfloat16])
    asked: dict[str, Any] = {"rows": draw.randrange(16, 256)}
    asked |= draw.choice([{}, {"loss": "plain"}, {"loss": {"rows": draw.randrange(16, 256)}}])
    batches, results = _tokens(), []
    for is_bare in (True, False):
        model = MODELS[name]().to(dtype)
        more = {} if is_bare else {"min_bytes": 0, **draw.choice([*FATES.values()])}
        engine = draw.choice([virtual(seed), "host"])
        with contextlib.ExitStack() as stack:
            if is_bare or draw.random() < 0.5:
                stack.enter_context(lowtide.apply(model, {**asked, **more}, engine=engine))
            else:
                budget, memory = f"{draw.randrange(400, 3000)}KiB", {"min_bytes": 0, **asked}
                stack.enter_context(lowtide.optimize(model, budget=budget, memory=memory, engine=engine))
            results.append([_step(model, batch) for batch in (*batches, batches[0])])
    for bare, other in zip(*results, strict=True):
        _assert_same_steps(bare, other)


def test_one_block_is_the_plain_step() -> None:
    (batch, _), model = _tokens(), MODELS["llama"]()
    want = _step(model, batch)
    with lowtide.apply(model, {"rows": 256}):
        _assert_same_steps(want, _step(model, batch))


def test_a_plan_without_a_device_sees_what_is_gone() -> None:
    (batch, _), model = _tokens(), MODELS["llama"]()
    how: dict[str, Any] = {"budget": "1GiB", "hardware": "h200"}
    whole, blocks = (lowtide.plan(model, batch, memory=memory, **how) for memory in ({}, {"rows": 16}))
    assert whole.predicted is not None and blocks.predicted is not None
    assert whole.digest() != blocks.digest() and blocks.layer_rows == 16
    assert blocks.predicted.plain_peak_bytes < whole.predicted.plain_peak_bytes


@pytest.mark.filterwarnings("error:lowtide. the first forward was not the one")
def test_a_traced_plan_names_what_the_step_saves() -> None:
    """Though a trace runs two of sixteen blocks."""
    (batch, _), model = _tokens(), MODELS["llama"]()
    with lowtide.apply(model, {"rows": 16}):
        want = _step(model, batch)
    plan = lowtide.plan(model, batch, budget="560KiB", memory={"rows": 16, "min_bytes": 0}, hardware="h200")
    assert sum(site.fate is Fate.SWAP for site in plan.sites) > 2
    with lowtide.apply(model, plan, engine=virtual(3)):
        _assert_same_steps(want, _step(model, batch))


def test_a_copy_of_the_model_has_its_own_forward() -> None:
    (batch, _), model = _tokens(), MODELS["llama"]()
    want = _step(model, batch)
    take_layers_in_blocks(model, 64)
    _assert_same_steps(want, _step(copy.deepcopy(model), batch))


def test_another_result_in_backward_is_refused() -> None:
    layer, (x, shift, _) = Layer(), _numbers(torch.float32)
    take_layers_in_blocks(model := Own(layer), 64)
    out = model(x, shift)
    layer.qkv.weight.data[3, 4] += 1  # no version counts it
    with pytest.raises(RuntimeError, match=r"^lowtide: a layer in blocks gave other values in the backward pass than"):
        out.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    x, shift, _ = _numbers(torch.float32)
    take_layers_in_blocks(model := Own(Layer()), 64)
    with pytest.raises(RuntimeError, match=r"^lowtide: a second derivative \(create_graph\) of a layer in blocks is"):
        torch.autograd.grad(model(x.requires_grad_(), shift).sum(), x, create_graph=True)


def _mean(layer: Layer) -> None:
    layer.drop.forward = lambda x: x + x.mean(-2, keepdim=True)  # type: ignore[method-assign]


class _Softmax(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        query, key, value = (each.transpose(-3, -2) for each in self.before(x, shift))
        return self.after(x, ((query @ key.mT).softmax(-1) @ value).transpose(-3, -2))


def _far(layer: Layer) -> None:
    """Each row talks to the one forty rows before it."""
    layer.drop.forward = lambda x: x + x.roll(40, -2)  # type: ignore[method-assign]


def _places(layer: Layer) -> None:
    """Places are counted from the beginning of what the layer is given."""
    layer.drop.forward = lambda x: x * (1 + torch.arange(x.shape[-2])[:, None])  # type: ignore[method-assign]


def _foreign(layer: Layer) -> None:
    weight = nn.Parameter(torch.ones(32))
    layer.drop.forward = lambda x: x * weight  # type: ignore[method-assign]


def _own_softmax(layer: Layer) -> None:
    layer.__class__ = _Softmax


class _Dropping(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        query, key, value = (each.transpose(-3, -2) for each in self.before(x, shift))
        return self.after(x, F.scaled_dot_product_attention(query, key, value, dropout_p=0.5).transpose(-3, -2))


def _drops_in_attention(layer: Layer) -> None:
    layer.__class__ = _Dropping


def _hooked(layer: Layer) -> None:
    layer.up.register_forward_hook(lambda *_: None)


_HEAD, _END = (
    "memory.rows: 'layers.0' cannot be taken in blocks of rows: ",
    "; leave memory.rows out, or name what it may take with memory.row_wise",
)


@pytest.mark.parametrize(
    ("change", "more", "text"),
    [
        (_mean, (), "what it gives for a row depends on other rows"),
        (_far, (), "what it gives for a row depends on the other rows of its block"),
        (_places, (), "what it gives for a row depends on the other rows of its block"),
        (_foreign, (), "it reads a tensor that needs a gradient and is none of its parameters"),
        (_hooked, (), "there are hooks on its parts, which would see blocks"),
        (lambda layer: setattr(layer.drop, "p", 0.5), (), "it drops out at random (p = 0.5)"),
        (_drops_in_attention, (), "its attention drops out at random (p = 0.5)"),
        (
            _own_softmax,
            (),
            "its attention is not torch's scaled_dot_product_attention (attn_implementation='sdpa')",
        ),
        (None, (torch.zeros(4, 4),), "it is given a tensor of shape (4, 4), which has no row for each token"),
        (None, (object(),), "it is given a object (for a cache: pass use_cache=False)"),
    ],
)
def test_what_is_no_function_of_rows_is_named(change: Any, more: tuple[Any, ...], text: str) -> None:
    layer, (x, shift, _) = Layer(), _numbers(torch.float32)
    if change is not None:
        change(layer)

    def step() -> None:
        take_layers_in_blocks(model := Own(layer), 64)
        model(x, shift, *more)

    with pytest.raises(ConfigError) as caught:
        step()
    assert str(caught.value) == _HEAD + text + _END


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen3-moe", "it routes tokens to experts"),
        ("gemma2-softcap", "it is given a tensor of shape (4, 1, 64, 64), which has no row for each token"),
        ("llama", "transformers checkpoints it (call model.gradient_checkpointing_disable())"),
    ],
)
def test_models_of_transformers_that_are_refused(kind: str, text: str) -> None:
    model, (batch, _) = MODELS[kind](), _tokens()
    if kind == "llama":
        model.train()
        model.activation_checkpointing_enable()

    def step() -> None:
        with lowtide.apply(model, {"rows": 100}):
            _step(model, batch)

    with pytest.raises(ConfigError) as caught:
        step()
    assert str(caught.value) == _HEAD.replace("layers.0", "model.layers.0") + text + _END


def test_mistakes_in_the_file() -> None:
    with pytest.raises(ConfigError, match=r"must be 2 or more, not 1; write e\.g\. rows: 16384"):
        lowtide.apply(MODELS["llama"](), {"rows": 1})
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(nn.Linear(2, 2), {"rows": 9})
    assert str(caught.value) == (
        "memory.rows: Linear has no layers in a torch.nn.ModuleList, which could be taken in blocks of rows; leave "
        "memory.rows out, or name what it may take with memory.row_wise"
    )


@pytest.mark.extended
@pytest.mark.parametrize("row_wise", [[], ["mlp"]], ids=["layers", "declared"])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_peak_of_ten_plans_is_within_two_percent_of_what_was_said(row_wise: list[str], share: float) -> None:
    """Of every live byte on the host, and never above the budget."""
    (batch, _), model = _tokens(), MODELS["llama"]()
    memory: dict[str, Any] = {"min_bytes": 0, "rows": 64, "row_wise": row_wise}
    how: dict[str, Any] = {"memory": memory, "hardware": "h200"}
    plain = lowtide.plan(model, batch, budget="1GiB", **how).predicted
    assert plain is not None and plain.floor_bytes is not None
    budget = int(1.02 * plain.floor_bytes + share * (plain.plain_peak_bytes - plain.floor_bytes))
    with lowtide.optimize(model, budget=budget, memory=memory, engine="host") as tide:
        for _ in range(3):
            _step(model, batch)
        model.zero_grad()
        with tide.audit() as audit:
            model(**batch).loss.backward()
        assert tide.plan is not None and tide.plan.predicted is not None
        assert abs(audit.peak_bytes / tide.plan.predicted.peak_bytes - 1) <= 0.02
        assert audit.peak_bytes <= max(budget, tide.plan.predicted.floor_bytes or 0)
