"""MLPs in declared blocks: the bits of the declared sum. The mechanism is that of layers, with the draws of
test_layers.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.loss.layers import MLPS, InBlocks, block_rows_of
from tests.loss.test_attach import MODELS
from tests.loss.test_head import FATES, _assert_same_steps, _step, _tokens
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

_NUM_ROWS = 200


def declared(mlp: nn.Module, x: Tensor, of_out: Tensor, rows: int) -> list[Tensor]:
    """The declared sum, by plain PyTorch: the output, the gradient of the input and those of the weights."""
    x, out, of_x, sums = x.detach().requires_grad_(), [], [], [torch.zeros(())] * len(list(mlp.parameters()))
    for number, start in enumerate(range(0, len(x), rows)):
        block = slice(start, start + rows)
        made = mlp(x[block])
        inner, *products = torch.autograd.grad(made, [x, *mlp.parameters()], of_out[block])
        out.append(made.detach())
        of_x.append(inner[block])
        wide = [product.to(torch.promote_types(product.dtype, torch.float32)) for product in products]
        sums = [a + b if number else b for a, b in zip(sums, wide, strict=True)]
    of_weights = [each.to(p.dtype) for each, p in zip(sums, mlp.parameters(), strict=True)]
    return [torch.cat(out), torch.cat(of_x), *of_weights]


def _mlp(act: str, *, bias: bool, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=80, hidden_act=act, mlp_bias=bias)
    return LlamaMLP(config).to(dtype)


def _ours(mlp: nn.Module, x: Tensor, of_out: Tensor, rows: int) -> list[Tensor]:
    x = x.detach().requires_grad_()
    mlp.zero_grad()
    blocks = InBlocks(mlp, rows, MLPS)
    out = mlp(x)
    out.backward(of_out)
    blocks.remove()
    assert "forward" not in vars(mlp)
    return [out.detach(), x.grad, *(each.grad for each in mlp.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [1, 64, 100, 199, 200, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(("act", "bias"), [("silu", False), ("silu", True), ("gelu_pytorch_tanh", False)])
def test_the_declared_sum(rows: int, dtype: torch.dtype, act: str, bias: bool) -> None:
    mlp = _mlp(act, bias=bias, dtype=dtype)
    x, of_out = (torch.randn(_NUM_ROWS, 32).to(dtype) for _ in range(2))
    want, got = declared(mlp, x, of_out, rows), _ours(mlp, x, of_out, rows)
    assert [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not same_bits(a, b)] == []


@pytest.mark.parametrize("rows", [64, 1000])
def test_under_autocast(rows: int) -> None:
    """Weights in fp32, whose gradients of each block are those of bf16 products."""
    mlp = _mlp("silu", bias=True, dtype=torch.float32)
    x = torch.randn(_NUM_ROWS, 32)
    of_out = torch.randn(_NUM_ROWS, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        want, got = declared(mlp, x, of_out, rows), _ours(mlp, x, of_out, rows)
    assert [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not same_bits(a, b)] == []


def _declared_step(model: Any, batch: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """A step whose MLPs are replaced by a function that has the declared sum by its own definition."""

    class OfReference(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, mlp: Any, x: Tensor, *weights: Tensor) -> Tensor:
            ctx.mlp = mlp
            ctx.save_for_backward(x)
            flat = x.reshape(-1, x.shape[-1])
            return torch.cat([mlp(flat[start : start + rows]) for start in range(0, len(flat), rows)]).view(x.shape)

        @staticmethod
        def backward(ctx: Any, of_out: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            flat = [each.reshape(-1, each.shape[-1]) for each in (x, of_out)]
            with torch.enable_grad():
                _, of_x, *of_weights = declared(ctx.mlp, *flat, rows)
            return None, of_x.view(x.shape), *of_weights

    mlps = [module for module in model.modules() if hasattr(module, "gate_proj")]
    for mlp in mlps:
        twin = copy.copy(mlp)
        mlp.forward = lambda x, twin=twin: OfReference.apply(twin, x, *twin.parameters())
    made = _step(model, batch)
    for mlp in mlps:
        del mlp.forward
    return made


@pytest.mark.parametrize("fates", ["nothing", *FATES])
def test_no_plan_changes_a_bit(fates: str) -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    want = _declared_step(model, batch, 100)
    memory: dict[str, Any] = {"mlp": {"rows": 100}, **({} if fates == "nothing" else FATES[fates])}
    with lowtide.apply(model, memory, engine=virtual(3)) as tide:
        assert tide.plan.mlp_rows == 100 and lowtide.Plan.from_json(tide.plan.to_json()) == tide.plan
        assert "mlp: in blocks of 100 rows, as declared" in str(tide.plan)
        assert fates == "both" or block_rows_of(model, MLPS) == 100  # there an MLP that runs again stands around it
        for _ in range(2):
            _assert_same_steps(want, _step(model, batch))
    assert block_rows_of(model, MLPS) is None and not any("forward" in vars(module) for module in model.modules())


def test_one_block_is_the_plain_step() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    want = _step(model, batch)
    with lowtide.apply(model, {"mlp": {"rows": 256}}):
        _assert_same_steps(want, _step(model, batch))


def test_a_copy_of_the_model_has_its_own_forward() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    want = _step(model, batch)
    InBlocks(model, 64, MLPS)
    _assert_same_steps(want, _step(copy.deepcopy(model), batch))


def test_another_result_in_backward_is_refused() -> None:
    mlp = _mlp("silu", bias=False, dtype=torch.float32)
    InBlocks(mlp, 64, MLPS)
    out = mlp(torch.randn(_NUM_ROWS, 32))
    mlp.gate_proj.weight.data[3, 4] += 1  # no version counts it
    with pytest.raises(
        RuntimeError, match=r"^lowtide: an MLP in blocks gave other values in the backward pass than in"
    ):
        out.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    mlp, x = _mlp("silu", bias=False, dtype=torch.float32), torch.randn(_NUM_ROWS, 32, requires_grad=True)
    InBlocks(mlp, 64, MLPS)
    with pytest.raises(
        RuntimeError, match=r"^lowtide: a second derivative \(create_graph\) of an MLP in blocks is not"
    ):
        torch.autograd.grad(mlp(x).sum(), x, create_graph=True)


def _with_hook() -> Any:
    mlp = _mlp("silu", bias=False, dtype=torch.float32)
    mlp.act_fn.register_forward_hook(lambda *_: None)
    return nn.ModuleDict({"mlp": mlp})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            lambda: nn.Linear(2, 2),
            "memory.mlp: Linear has no MLP with gate_proj, up_proj, down_proj, act_fn, which can be taken in blocks of "
            "rows; leave memory.mlp out",
        ),
        (
            _with_hook,
            "memory.mlp: 'mlp' cannot be taken in blocks of rows: there are hooks on its parts, which would see "
            "blocks; leave memory.mlp out",
        ),
    ],
)
def test_mistakes_are_named(model: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(model(), {"mlp": {"rows": 64}})
    assert str(caught.value) == text


def test_rows_that_talk_to_each_other_are_refused() -> None:
    class Other(type(_mlp("silu", bias=False, dtype=torch.float32))):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean(0)

    mlp = _mlp("silu", bias=False, dtype=torch.float32)
    mlp.__class__ = Other
    with lowtide.apply(nn.ModuleDict({"mlp": mlp}), {"mlp": {"rows": 64}}), pytest.raises(ConfigError) as caught:
        mlp(torch.randn(_NUM_ROWS, 32))
    assert str(caught.value) == (
        "memory.mlp: 'mlp' cannot be taken in blocks of rows: what it gives for a row depends on other rows; leave "
        "memory.mlp out"
    )


def test_an_mlp_of_another_kind() -> None:
    """Whatever a module with these parts does to a row, with weights that it reads more than once."""

    class Twice(type(_mlp("silu", bias=False, dtype=torch.float32))):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x) + x)

    mlp = _mlp("silu", bias=True, dtype=torch.float32)
    mlp.__class__ = Twice
    x, of_out = (torch.randn(_NUM_ROWS, 32) for _ in range(2))
    want, got = declared(mlp, x, of_out, 64), _ours(mlp, x, of_out, 64)
    assert [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not same_bits(a, b)] == []


def test_blocks_of_an_mlp_within_blocks_of_its_layer_give_every_weight_a_gradient() -> None:
    """`memory.mlp` does not stand beside `memory.rows`; the weights of a block are no `nn.Parameter`s all the same."""
    model, (batch, _) = MODELS["llama"](), _tokens()
    layers = InBlocks(model, 64)
    want = _step(model, batch)
    layers.remove()
    InBlocks(model, 32, MLPS)
    InBlocks(model, 64)
    within = _step(model, batch)
    assert within.keys() == want.keys() and len(within) > len(list(model.parameters()))
    for key in want:
        assert torch.allclose(within[key], want[key], atol=1e-5, rtol=1e-4), key
