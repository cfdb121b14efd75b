"""Head and loss in declared blocks: the bits of the declared sum, whatever else is chosen."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.loss.attach import attach
from lowtide.loss.cross_entropy import whole_cross_entropy
from lowtide.loss.head import head_cross_entropy
from tests.loss.test_attach import MODELS
from tests.support.grid import in_turn, one_of
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

_WORDS, _WIDTH, _NUM_ROWS = 67, 32, 300
_ROWS = (1, 64, 100, 128, 299, 300, 1000)


def declared(
    hidden: Tensor, head: Any, target: Tensor, rows: int, *, upcast: bool, after: Any = lambda x: x, **how: Any
) -> list[Tensor]:
    """The declared sum, by plain PyTorch: the loss, and the gradients of hidden states, weight and bias."""
    hidden, wide = hidden.detach().requires_grad_(), torch.promote_types(torch.float32, head.weight.dtype)
    parameters = [head.weight, *([] if head.bias is None else [head.bias])]
    blocks = [slice(start, start + rows) for start in range(0, len(hidden), rows)]
    logits = [after(head(hidden[block])) for block in blocks]
    whole = torch.cat([each.detach() for each in logits]).requires_grad_()
    loss = whole_cross_entropy(
        whole.float() if upcast else whole, target, **{"ignore_index": -100, "reduction": "mean", **how}
    )
    (of_logits,) = torch.autograd.grad(loss, whole)
    of_hidden, sums = [], [torch.zeros(())] * len(parameters)
    for number, block in enumerate(blocks):
        inner, *products = torch.autograd.grad(logits[number], [hidden, *parameters], of_logits[block])
        of_hidden.append(inner[block])
        sums = [a.to(wide) + b if number else b.to(wide) for a, b in zip(sums, products, strict=True)]
    return [loss.detach(), torch.cat(of_hidden), *(each.to(p.dtype) for each, p in zip(sums, parameters, strict=True))]


def _case(dtype: torch.dtype, *, bias: bool = False, seed: int = 0) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(seed)
    head = nn.Linear(_WIDTH, _WORDS, bias=bias, dtype=dtype)
    target = torch.randint(_WORDS, (_NUM_ROWS,))
    target[torch.rand(_NUM_ROWS) < 0.2] = -100
    return torch.randn(_NUM_ROWS, _WIDTH).mul_(3).to(dtype), head, target


def _ours(hidden: Tensor, head: nn.Linear, target: Tensor, **how: Any) -> list[Tensor]:
    hidden = hidden.detach().requires_grad_()
    head.zero_grad()
    loss = head_cross_entropy(hidden, head, target, **how)
    loss.backward()
    return [loss.detach(), *(each.grad for each in (hidden, *head.parameters()) if each.grad is not None)]


def _plain(hidden: Tensor, head: nn.Linear, target: Tensor, *, upcast: bool, **how: Any) -> list[Tensor]:
    hidden = hidden.detach().requires_grad_()
    head.zero_grad()
    logits = head(hidden)
    loss = whole_cross_entropy(
        logits.float() if upcast else logits, target, **{"ignore_index": -100, "reduction": "mean", **how}
    )
    loss.backward()
    return [loss.detach(), *(each.grad for each in (hidden, *head.parameters()) if each.grad is not None)]


def _assert_same(want: list[Tensor], got: list[Tensor]) -> None:
    assert len(want) == len(got)
    assert [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not same_bits(a, b)] == []


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "dtype"), in_turn(3, _ROWS, [torch.float32, torch.bfloat16, torch.float64]))
def test_the_declared_sum(dtype: torch.dtype, bias: bool, rows: int) -> None:
    case = _case(dtype, bias=bias)
    for how in (
        {},
        {"reduction": "sum"},
        {"ignore_index": 3},
    ):
        case[2][case[2] < 0] = how.get("ignore_index", -100)
        upcast = dtype is torch.bfloat16
        _assert_same(declared(*case, rows, upcast=upcast, **how), _ours(*case, rows=rows, upcast=upcast, **how))
        if rows >= _NUM_ROWS:  # one block
            _assert_same(_plain(*case, upcast=upcast, **how), _ours(*case, rows=rows, upcast=upcast, **how))


@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_under_autocast(rows: int, hidden_dtype: torch.dtype) -> None:
    hidden, head, target = _case(torch.float32, bias=True)
    case = (hidden.to(hidden_dtype), head, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = _ours(*case, rows=rows)
        narrow = nn.Linear(_WIDTH, _WORDS, dtype=torch.bfloat16)
        narrow.load_state_dict(head.state_dict())
        if rows >= _NUM_ROWS:
            _assert_same(_plain(*case, upcast=False), got)
    assert [each.dtype for each in got] == [torch.float32, hidden_dtype, torch.float32, torch.float32]
    want = declared(hidden.bfloat16(), narrow, target, rows, upcast=True)
    _assert_same([want[0], want[1].to(hidden_dtype)], got[:2])  # sums of several blocks keep their fp32 here
    for a, b in zip(want[2:], got[2:], strict=True):
        assert same_bits(a, b.bfloat16())


@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_chosen_changes_no_bit(rows: int, dtype: torch.dtype) -> None:
    case = _case(dtype, bias=True)
    want = _ours(*case, rows=rows, upcast=True)
    for slice_rows in (64, 128, 448):
        _assert_same(want, _ours(*case, rows=rows, upcast=True, slice_rows=slice_rows))


def test_frozen_parts_get_no_gradient_and_change_none() -> None:
    hidden, head, target = _case(torch.float32, bias=True)
    want = _ours(hidden, head, target, rows=100)
    head.weight.requires_grad_(False)
    got = _ours(hidden, head, target, rows=100)
    assert head.weight.grad is None
    _assert_same([want[0], want[1], want[3]], got)
    head.requires_grad_(False)
    _assert_same(want[:2], _ours(hidden, head, target, rows=100))
    head.requires_grad_(True)
    loss = head_cross_entropy(hidden, head, target, rows=100)  # hidden states that need none
    loss.backward()
    _assert_same(want[2:], [head.weight.grad, head.bias.grad])


def test_all_targets_ignored_and_values_that_are_no_numbers() -> None:
    hidden, head, target = _case(torch.float32)
    nothing = torch.full_like(target, -100)
    _assert_same(_plain(hidden, head, nothing, upcast=False), _ours(hidden, head, nothing, rows=1000))
    hidden[7] = float("nan")
    with contextlib.suppress(AssertionError):
        _assert_same(_plain(hidden, head, target, upcast=False), _ours(hidden, head, target, rows=1000))
    assert _ours(hidden, head, target, rows=100)[0].isnan()


def test_another_loss_in_backward_is_refused() -> None:
    hidden, head, target = _case(torch.float32)
    loss = head_cross_entropy(hidden.requires_grad_(), head, target, rows=100)
    head.weight.data[3, 4] += 1  # no version counts it
    with pytest.raises(RuntimeError, match=r"^lowtide: the head gave other values in the backward pass than in the "):
        loss.backward()
    loss = head_cross_entropy(hidden, head, target, rows=100)
    with torch.no_grad():
        head.weight[3, 4] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    hidden, head, target = _case(torch.float32)
    loss = head_cross_entropy(hidden.requires_grad_(), head, target, rows=100)
    with pytest.raises(
        RuntimeError, match=r"^lowtide: a second derivative \(create_graph\) of the head is not covered"
    ):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_gradient_accumulation_and_a_second_backward() -> None:
    hidden, head, target = _case(torch.bfloat16)
    one, two, three = (_ours(hidden, head, target, rows=100)[2] for _ in range(3))
    head.zero_grad()
    loss = head_cross_entropy(hidden, head, target, rows=100)
    loss.backward(retain_graph=True)
    loss.backward()
    assert same_bits(one, two) and same_bits(two, three) and same_bits(head.weight.grad, one + two)


# -- in models of transformers


def _tokens(num: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, _WORDS, (4, 64), generator=generator) for _ in range(num)]
    return [{"input_ids": each, "labels": each.masked_fill(torch.rand(each.shape) < 0.2, -100)} for each in tokens]


_AFTER = {"gemma2-softcap": lambda x: torch.tanh(x / 5.0) * 5.0, "granite-scaled": lambda x: x / 4.0}
"""What models do to their logits."""


def _step(model: Any, batch: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    output = model(**batch, **more)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **gradients}


def _declared_step(model: Any, name: str, batch: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The same with the declared sum for head and loss, and plain autograd for the rest."""
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.zero_grad()
    torch.manual_seed(3)
    model(input_ids=batch["input_ids"])
    hook.remove()
    labels = batch["labels"]
    if "masked" not in name:
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    (hidden,) = seen
    rows_of_head = hidden.reshape(-1, hidden.shape[-1])
    after = _AFTER.get(name, lambda x: x)
    loss, of_hidden, *of_head = declared(rows_of_head, head, labels.reshape(-1), rows, upcast=True, after=after)
    for parameter, gradient in zip(head.parameters(), of_head, strict=True):
        parameter.grad = gradient
    rows_of_head.backward(of_hidden)
    return {"loss": loss} | {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def _assert_same_steps(want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert want.keys() == got.keys()
    assert [name for name in want if not same_bits(want[name], got[name])] == []


@pytest.mark.parametrize(("name", "dtype"), in_turn(2, MODELS, [torch.float32, torch.bfloat16]))
def test_models_have_the_bits_of_the_declared_sum(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype)
    for batch, rows in zip(_tokens(3), (64, 100, 255), strict=True):
        want = _declared_step(model, name, batch, rows)
        before = set(vars(model))
        handle = attach(model, rows)
        got = _step(model, batch)
        assert handle.loss.was_sliced and model(**batch).logits.shape == (4, 0, _WORDS)
        handle.close()
        assert set(vars(model)) == before and model(**batch).logits.shape == (4, 64, _WORDS)
        _assert_same_steps(want, got)


def test_one_block_is_the_plain_step() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    want = _step(model, batch)
    with lowtide.apply(model, {"loss": {"rows": 256}}):
        assert model(**batch).logits.shape == (4, 64, _WORDS)
        _assert_same_steps(want, _step(model, batch))


FATES: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "all"},
    "swap": {"swap": "all", "min_bytes": 0},
    "both": {"recompute": ["layers.*.mlp"], "swap": ["layers.*.input_layernorm", "norm"], "min_bytes": 0},
}


@pytest.mark.parametrize(("fates", "engine"), in_turn(2, FATES, ["virtual", "host"]))
def test_no_plan_and_no_engine_changes_a_bit(fates: str, engine: str) -> None:
    for name in ("llama", "llama-tied", "gemma2-softcap"):
        model, (batch, _) = MODELS[name](), _tokens()
        want = _declared_step(model, name, batch, 100)
        with lowtide.apply(
            model, {"loss": {"rows": 100}, **FATES[fates]}, engine=virtual(3) if engine == "virtual" else engine
        ) as tide:
            assert (tide.plan.loss, tide.plan.loss_rows) == ("sliced", 100)
            for _ in range(2):
                _assert_same_steps(want, _step(model, batch))


@pytest.mark.parametrize("budget", one_of(2, ["500KiB", "700KiB", "10MiB"]))
def test_no_budget_changes_a_bit(budget: str) -> None:
    model, batches = MODELS["llama"](), _tokens(4)
    want = [_declared_step(model, "llama", batch, 100) for batch in batches]
    memory = {"min_bytes": 0, "loss": {"rows": 100}}
    with lowtide.optimize(model, budget=budget, memory=memory, engine=virtual(3)) as tide:
        for batch, expected in zip(batches, want, strict=True):
            _assert_same_steps(expected, _step(model, batch))
        plan = tide.plan
        assert plan is not None and plan.loss_rows == 100 and lowtide.Plan.from_json(plan.to_json()) == plan
        assert "loss: head and loss in blocks of 100 rows, as declared" in str(plan)
    with lowtide.apply(model, plan, engine=virtual(5)):
        _assert_same_steps(want[0], _step(model, batches[0]))


def test_a_plan_without_a_device_sees_that_logits_are_gone() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    how: dict[str, Any] = {"budget": "1GiB", "hardware": "h200"}
    sliced, blocks = (lowtide.plan(model, batch, memory={"loss": loss}, **how) for loss in ("sliced", {"rows": 64}))
    assert sliced.predicted is not None and blocks.predicted is not None
    assert sliced.digest() != blocks.digest() and blocks.loss_rows == 64
    assert blocks.predicted.peak_bytes < sliced.predicted.peak_bytes - 192 * _WORDS * 4


def test_steps_that_go_as_without_rows() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    handle = attach(model, 64)
    with torch.no_grad():
        assert model(**batch).logits.shape == (4, 64, _WORDS)
    assert model(input_ids=batch["input_ids"]).logits.shape == (4, 64, _WORDS)
    model.requires_grad_(False)
    assert model(**batch).logits.shape == (4, 64, _WORDS)
    model.requires_grad_(True)
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    assert model(**batch).logits.shape == (4, 64, _WORDS)
    handle.close()


def test_an_error_in_a_forward_leaves_nothing() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    want = _declared_step(model, "llama", batch, 64)
    attach(model, 64)
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"], labels=batch["labels"] + 1000)
    assert model(input_ids=batch["input_ids"]).logits.shape == (4, 64, _WORDS)
    _assert_same_steps(want, _step(model, batch))


def test_other_calls_of_the_loss() -> None:
    """Labels that are shifted already, a number of items, positional labels, autocast."""
    model, (batch, _) = MODELS["llama"](), _tokens()
    handle = attach(model, 64)
    want = _step(model, batch)
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    _assert_same_steps(want, _step(model, batch, shift_labels=shifted))
    num_items = int((shifted != -100).sum())
    for number in (num_items, torch.tensor(num_items)):
        got = _step(model, batch, num_items_in_batch=number)
        torch.testing.assert_close(want, got)
    handle.close()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = _step(model, batch)
        handle = attach(model, 64)
        got = _step(model, batch)
        assert handle.loss.was_sliced
        torch.testing.assert_close(want, got, rtol=0.05, atol=1e-3)


def test_logits_that_are_written_to_in_place_are_scaled_too() -> None:
    steps = []
    for scale in (lambda logits: logits / 3.0, lambda logits: logits.div_(3.0)):
        model, (batch, _) = MODELS["llama"](), _tokens()
        model.lm_head.register_forward_hook(lambda head, args, logits, scale=scale: scale(logits))
        handle = attach(model, 64)
        steps.append(_step(model, batch))
        assert handle.loss.was_sliced
    _assert_same_steps(*steps)


def test_a_hook_that_changes_what_the_head_is_given_afterwards_is_refused() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    attach(model, 64)
    model.lm_head.register_forward_pre_hook(lambda head, args: (args[0] * 2,))
    with pytest.raises(ConfigError, match=r"^memory\.loss: rows: a hook of the head changes what it is given, and was"):
        model(**batch)


def test_a_copy_and_a_file_of_the_model_are_plain() -> None:
    model, (batch, _) = MODELS["llama"](), _tokens()
    want = _step(model, batch)
    attach(model, 64)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        _assert_same_steps(want, _step(other, batch))


def _scaled_by_words() -> nn.Module:
    model: Any = MODELS["llama"]()
    model.lm_head.register_forward_hook(lambda *given: given[2].softmax(-1))
    return model


def _with_replaced_forward() -> nn.Module:
    model: Any = MODELS["llama"]()
    model.lm_head.forward = model.lm_head.forward
    return model


class _Head(nn.Linear):
    pass


def _with_own_loss() -> nn.Module:
    import transformers

    small = {"vocab_size": _WORDS, "d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 48}
    return transformers.BartForCausalLM(transformers.BartConfig(**small, decoder_attention_heads=2))


def _with_own_head() -> nn.Module:
    model: Any = MODELS["llama"]()
    model.lm_head = _Head(32, _WORDS, bias=False)
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            _scaled_by_words,
            "memory.loss: rows: between its head and its loss this model does Softmax, which is not known to work on "
            "each number by itself; write loss: sliced",
        ),
        (
            _with_own_loss,
            "memory.loss: this model's loss cannot be sliced: the forward of BartForCausalLM has a loss of its own; "
            "write loss: plain",
        ),
        (
            _with_own_head,
            "memory.loss: rows: this model's head cannot be taken in blocks: the head is _Head, not a plain "
            "torch.nn.Linear; write loss: sliced",
        ),
        (
            _with_replaced_forward,
            "memory.loss: rows: this model's head cannot be taken in blocks: somebody has replaced the forward of its "
            "head; write loss: sliced",
        ),
    ],
)
def test_models_that_are_refused(model: Any, text: str) -> None:
    made, (batch, _) = model(), _tokens()
    with pytest.raises(ConfigError) as caught, lowtide.apply(made, {"loss": {"rows": 64}}):
        made(**batch)
    assert str(caught.value) == text


def test_in_a_loop_of_ones_own() -> None:
    hidden, head, target = _case(torch.bfloat16, bias=True)
    loss = lowtide.cross_entropy(hidden.requires_grad_(), target, head=head, rows=100, upcast=True)
    loss.backward()
    want = declared(hidden, head, target, 100, upcast=True)
    _assert_same(want, [loss.detach(), hidden.grad, head.weight.grad, head.bias.grad])


_TOGETHER = (
    "lowtide.cross_entropy: head and rows go together: in blocks of rows the head's matmul is part of the loss; give "
    "both (and what the head reads in place of logits), or neither"
)


def _hooked_head() -> nn.Linear:
    head = nn.Linear(32, 67)
    head.register_forward_hook(lambda module, args, logits: logits * 2)
    return head


def test_torch_func_and_no_rows() -> None:
    hidden, head, target = _case(torch.float32)
    loss_of = functools.partial(lowtide.cross_entropy, head=head, rows=64)
    with pytest.raises(ConfigError, match=r"torch\.func and forward-mode derivatives are not covered in blocks"):
        torch.func.grad(loss_of)(hidden, target)
    loss_of(hidden[:0], target[:0], reduction="sum").backward()
    assert not head.weight.grad.any()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"rows": 64}, _TOGETHER),
        ({"head": nn.Linear(32, 67)}, _TOGETHER),
        ({"head": nn.Linear(32, 67), "rows": 0}, "lowtide.cross_entropy: rows must be 1 or more, not 0"),
        (
            {"head": nn.Linear(32, 67), "rows": 64, "weight": torch.ones(67)},
            "lowtide.cross_entropy: a weight of classes, label_smoothing, z_loss, words that are spread over ranks, "
            "torch.func and forward-mode derivatives are not covered in blocks of rows; leave head and rows out",
        ),
        (
            {"head": _hooked_head(), "rows": 64},
            "lowtide.cross_entropy: this cannot be taken in blocks of rows: the head has hooks, which would not run",
        ),
        (
            {"head": nn.Sequential(), "rows": 64},
            "lowtide.cross_entropy: this cannot be taken in blocks of rows: the head is Sequential, not a plain "
            "torch.nn.Linear",
        ),
        (
            {"head": nn.Linear(32, 67, dtype=torch.bfloat16), "rows": 64},
            "lowtide.cross_entropy: hidden states are float32 and the head's weight is bfloat16; cast one of them, or "
            "use autocast",
        ),
    ],
)
def test_mistakes_are_named(how: dict[str, Any], text: str) -> None:
    hidden, _, target = _case(torch.float32)
    with pytest.raises(ConfigError) as caught:
        lowtide.cross_entropy(hidden, target, **how)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ({"rows": 0}, "memory.loss.rows: must be 1 or more, not 0; write e.g. rows: 16384"),
        ({"row": 64}, "memory.loss.row: unknown key; did you mean 'rows'?"),
        ({}, "memory.loss.rows: missing key; expected an integer"),
    ],
)
def test_mistakes_in_the_memory_section_are_named(loss: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(MODELS["llama"](), {"loss": loss})
    assert str(caught.value) == text
