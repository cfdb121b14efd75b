"""The sliced loss in models of transformers: the bits of whole steps, and nothing left behind."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.loss import cross_entropy
from lowtide.loss.attach import SlicedLoss, attach, loss_of, why_not
from tests.support.grid import in_turn, one_of
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

_WORDS = 67
_SMALL = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def _model(kind: str, **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**_SMALL, **more})
    torch.manual_seed(0)
    name = {"ModernBert": "ModernBertForMaskedLM", "GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    model: nn.Module = getattr(transformers, name)(config)
    return model.train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _model("Llama"),
    "llama-tied": lambda: _model("Llama", tie_word_embeddings=True),
    "mistral": lambda: _model("Mistral"),
    "qwen2": lambda: _model("Qwen2"),
    "qwen3-moe": lambda: _model("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gemma2-softcap": lambda: _model("Gemma2", final_logit_softcapping=5.0),
    "granite-scaled": lambda: _model("Granite", logits_scaling=4.0),
    "gpt2": lambda: _model("GPT2", n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0, resid_pdrop=0),
    "modernbert-masked": lambda: _model("ModernBert", pad_token_id=0, max_position_embeddings=64),
}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_LEAST_BYTES", 1)


def _batches(num: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(num):
        tokens = torch.randint(1, _WORDS, (4, 64), generator=generator)
        labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.2, -100)
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def _step(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    """Loss and gradients of two micro-batches, added up."""
    model.zero_grad()
    torch.manual_seed(3)
    result = {}
    for number, batch in enumerate(_batches()):
        loss = model(**batch, **more).loss
        loss.backward()
        result[f"loss {number}"] = loss.detach()
    return result | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert want.keys() == got.keys()
    assert [name for name in want if not same_bits(want[name], got[name])] == []


def _asked(loss: Any, dtype: torch.dtype) -> bool:
    """Whether it has asked once whether it keeps bits, for logits of this dtype."""
    loss._keeps_bits(torch.device("cpu"), dtype, _WORDS)
    misses: int = loss._keeps_bits.cache_info().misses
    return misses == 1


@pytest.mark.parametrize(("name", "dtype"), in_turn(2, MODELS, [torch.float32, torch.bfloat16]))
def test_loss_and_gradients_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype)
    for more in ({}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(17)}):
        want, before = _step(model, **more), set(vars(model))
        handle = attach(model)
        got = _step(model, **more)
        assert loss_of(model) == "sliced" and handle.loss.was_sliced
        handle.close()
        assert _asked(handle.loss, dtype) and handle.loss._keeps_bits(torch.device("cpu"), dtype, _WORDS)
        assert set(vars(model)) == before and loss_of(model) == "plain"
        _assert_same(want, got)


def test_under_autocast_too() -> None:
    model = MODELS["llama"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = _step(model)
        handle = attach(model)
        got = _step(model)
    assert _asked(handle.loss, torch.bfloat16)
    _assert_same(want, got)


MEMORY: dict[str, dict[str, Any]] = {
    "alone": {"loss": "sliced"},
    "recompute": {"loss": "auto", "recompute": "all"},
    "swap": {"loss": "sliced", "swap": "all", "min_bytes": 0},
    "both": {"loss": "sliced", "recompute": ["layers.*.mlp"], "swap": ["layers.*.norm*"], "min_bytes": 0},
}
_NAMES = {"gpt2": ["h.*.mlp", "h.*.ln_1"], "modernbert-masked": ["layers.*.mlp", "layers.*.mlp_norm"]}
"""Modules of models that name theirs in another way."""


@pytest.mark.parametrize(
    ("name", "fates"),
    [("llama", fates) for fates in MEMORY]
    + [(name, ("recompute", "swap", "both")[number % 3]) for number, name in enumerate(MODELS) if name != "llama"],
)
@pytest.mark.parametrize("autocast", one_of(2, [True, False]), ids=["autocast", ""])
def test_with_the_other_fates(name: str, fates: str, autocast: bool) -> None:
    model, memory = MODELS[name](), MEMORY[fates]
    if fates == "both":
        layer, norm = _NAMES.get(name, ["layers.*.mlp", "layers.*.input_layernorm"])
        memory = {**memory, "recompute": [layer], "swap": [norm]}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        want, before = _step(model), set(vars(model))
        with lowtide.apply(model, memory, engine=virtual(3)) as tide:
            assert tide.plan.loss == "sliced"
            _assert_same(want, _step(model))
            assert loss_of(model) == "sliced"
            _assert_same(want, _step(model))
    assert set(vars(model)) == before


def test_on_autopilot() -> None:
    model = MODELS["llama"]()
    want, before = _step(model), set(vars(model))
    with lowtide.optimize(model, budget="900KiB", memory={"min_bytes": 0}, engine=virtual(3)) as tide:
        for _ in range(4):
            _assert_same(want, _step(model))
        assert tide.plan is not None and tide.plan.loss == "sliced"
        assert "loss: sliced (its rows in slices, the same bits)" in str(tide.plan).splitlines()
        assert lowtide.Plan.from_json(tide.plan.to_json()) == tide.plan
    assert set(vars(model)) == before


def test_beside_a_file_of_mindspore_transformers() -> None:
    from lowtide.config.memory import MemoryConfig
    from lowtide.mindformers.follow import follow, sections_in

    model = MODELS["llama"]()
    want, before = _step(model), set(vars(model))
    sections = sections_in({"recompute_config": {"recompute": True}})
    assert sections is not None
    for memory, loss in ((MemoryConfig(loss="sliced"), "sliced"), (None, "plain")):
        with follow(model, sections, memory=memory):
            _assert_same(want, _step(model))
            assert loss_of(model) == loss
    assert set(vars(model)) == before


def test_plain_stays_plain() -> None:
    model = MODELS["llama"]()
    with lowtide.optimize(model, budget="1GiB", memory={"loss": "plain"}) as tide:
        _step(model)
        assert tide.plan is not None and tide.plan.loss == "plain" and loss_of(model) == "plain"
    with lowtide.apply(model, {"recompute": "all"}):
        assert loss_of(model) == "plain"


def test_a_plan_without_a_device_has_less_to_keep() -> None:
    model, batch = MODELS["llama"](), _batches(1)[0]
    how: dict[str, Any] = {"budget": "1GiB", "hardware": "h200"}
    plain, sliced = (lowtide.plan(model, batch, memory={"loss": loss}, **how) for loss in ("plain", "sliced"))
    assert (plain.loss, sliced.loss) == ("plain", "sliced") and loss_of(model) == "plain"
    assert sliced.predicted is not None and plain.predicted is not None
    assert sliced.predicted.peak_bytes < plain.predicted.peak_bytes


def test_logits_that_somebody_holds_stay_what_they_were() -> None:
    model, batch = MODELS["llama"](), _batches(1)[0]
    attach(model)
    output = model(**batch)
    before = output.logits.detach().clone()
    output.loss.backward()
    assert same_bits(before, output.logits.detach())


def test_evaluation_and_a_model_inside_another() -> None:
    model = MODELS["llama"]()
    outer, batch = nn.ModuleDict({"inner": model}), _batches(1)[0]
    with torch.no_grad():
        want = model(**batch).loss
        handle = attach(outer)
        assert same_bits(want, model(**batch).loss)
    handle.close()
    assert loss_of(outer) == "plain"


def test_a_copy_of_the_model_computes_the_same() -> None:
    model = MODELS["llama"]()
    want = _step(model)
    handle = attach(model)
    twin = copy.deepcopy(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    handle.close()
    for other in (twin, torch.load(saved, weights_only=False)):
        _assert_same(want, _step(other))
        assert loss_of(other) == "plain" and other.loss_function.__name__ == "ForCausalLMLoss"


def test_a_second_derivative_and_written_logits_are_refused_by_name() -> None:
    """Where plain autograd would do both, a model under `loss: auto` would else be silently wrong, or say it oddly."""
    model, batch = MODELS["llama"](), _batches(1)[0]
    weights: list[Any] = [model.lm_head.weight]  # torch has no second derivative of its attention on the CPU
    with lowtide.apply(model, {"loss": "sliced"}):
        loss = model(**batch).loss
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        with pytest.raises(RuntimeError, match=r"^lowtide: a second derivative of a loss in slices is not covered; "):
            torch.autograd.grad(sum(each.pow(2).sum() for each in gradients) + loss, weights)
        output = model(**batch)
        with torch.no_grad():
            output.logits.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"^lowtide: the logits were written to between the loss and its back"):
            output.loss.backward()


def test_reading_logits_after_the_loss_is_fine() -> None:
    """Another loss on the same logits, and a metric."""
    model, batch = MODELS["llama-tied"](), _batches(1)[0]

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        output = model(**batch)
        entropy = torch.distributions.Categorical(logits=output.logits.float()).entropy().mean()
        (output.loss + 0.1 * entropy).backward()
        hits = (output.logits.argmax(-1) == batch["labels"]).sum()
        result = {"loss": output.loss.detach(), "entropy": entropy.detach(), "hits": hits}
        return result | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = step()
    with lowtide.apply(model, {"loss": "sliced", "recompute": "all"}):
        got = step()
        assert loss_of(model) == "sliced"
    _assert_same(want, got)


def test_a_compiler_gets_the_model_s_own_loss() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = torch.randn(1, 300, _WORDS), torch.zeros(1, 300, dtype=torch.int64)
    loss = SlicedLoss(ForCausalLMLoss, shifts=True)
    compiled = torch.compile(lambda logits: loss(logits, labels, _WORDS), backend="eager", fullgraph=True)
    assert same_bits(compiled(logits), ForCausalLMLoss(logits, labels, _WORDS))
    assert not loss._keeps_bits.cache_info().currsize


def test_forward_mode_and_torch_func_get_the_model_s_own_loss() -> None:
    from torch.autograd import forward_ad
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = torch.randn(1, 300, _WORDS), torch.zeros(1, 300, dtype=torch.int64)
    loss = SlicedLoss(ForCausalLMLoss, shifts=True)
    want = torch.func.grad(lambda logits: ForCausalLMLoss(logits, labels, _WORDS))(logits)
    assert same_bits(torch.func.grad(lambda logits: loss(logits, labels, _WORDS))(logits), want)
    with forward_ad.dual_level():
        made = loss(forward_ad.make_dual(logits, logits), labels, _WORDS)
        assert forward_ad.unpack_dual(made).tangent is not None


def test_a_loss_set_later_is_not_taken_away() -> None:
    model = MODELS["llama"]()
    handle = attach(model)
    model.loss_function = own = lambda logits, labels, vocab_size: logits.sum()
    handle.close()
    assert model.loss_function is own


def test_where_the_bits_differ_the_loss_is_plain_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    want = _step(model)
    monkeypatch.setattr(cross_entropy, "same_bits", lambda *_: False)
    attach(model)
    with pytest.warns(UserWarning, match="stays plain") as caught:
        _assert_same(want, _step(model))
    assert [str(each.message) for each in caught] == [
        "lowtide: memory.loss: the loss stays plain: in slices it has other bits here "
        f"(torch {torch.__version__}, cpu, float32, {_WORDS} words)"
    ]


@pytest.mark.parametrize("how", ["a part of the logits", "labels that are shifted already"])
def test_calls_that_models_make(how: str) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, 80, _WORDS, generator=generator).bfloat16()
    labels = torch.randint(_WORDS, (4, 80), generator=generator)
    sliced, results = SlicedLoss(ForCausalLMLoss, shifts=True), []
    for loss in (ForCausalLMLoss, sliced):
        logits = numbers.clone().requires_grad_()
        if how == "a part of the logits":
            loss(logits[:, 3:], labels[:, 3:], _WORDS).backward()
        else:
            loss(logits, None, _WORDS, shift_labels=labels).backward()
        results.append(logits.grad)
    assert sliced.was_sliced
    assert same_bits(*results)


def test_a_changed_meaning_of_the_replaced_function_is_seen() -> None:
    """As a later transformers might: the self-test asks the very function that is replaced."""

    def other(logits: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, vocab_size, **more) * 1.0000001

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 300, _WORDS, generator=generator, requires_grad=True)
    labels = torch.randint(_WORDS, (1, 300), generator=generator)
    with pytest.warns(UserWarning, match="stays plain"):
        loss = SlicedLoss(other, shifts=True)(logits, labels, _WORDS)
    assert same_bits(loss.detach(), other(logits, labels, _WORDS).detach())


def test_what_it_does_not_cover_goes_to_the_model_s_own() -> None:
    loss = SlicedLoss(lambda **_: torch.tensor(7.0), shifts=True)
    labels = torch.zeros(1, 300, dtype=torch.int64)
    assert loss(torch.zeros(1, 300, 4, dtype=torch.float64), labels, 4) == 7
    assert loss(torch.zeros(1, 300, 4), labels.to(torch.int32), 4) == 7
    assert loss(torch.zeros(1, 200, 4), labels[:, :200], 4) == 7  # too small to be worth slices


def _focal(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    return logits.view(-1, vocab_size)[labels.view(-1) >= 0].sum()


def _with_own_loss() -> nn.Module:
    model = MODELS["llama"]()
    model.loss_function = _focal
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            lambda: nn.Linear(2, 2),
            "memory.loss: this model's loss cannot be sliced: it has no loss_function of transformers, which is where "
            "a loss can be exchanged; in a training loop of your own call lowtide.cross_entropy; write loss: plain",
        ),
        (
            _with_own_loss,
            "memory.loss: this model's loss cannot be sliced: its loss_function is _focal, of which lowtide does not "
            "know that it works row by row; write loss: plain",
        ),
    ],
)
def test_mistakes_are_named(model: Callable[[], nn.Module], text: str) -> None:
    made = model()
    assert why_not(made)
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(made, {"loss": "sliced"})
    assert str(caught.value) == text
    with lowtide.apply(made, {"loss": "auto"}) as tide:
        assert tide.plan.loss == "plain"


def test_a_loss_that_is_never_called_is_said() -> None:
    """As with a trainer that smooths labels: it takes them away from the model, and has a loss of its own."""
    from transformers.trainer_pt_utils import LabelSmoother

    model, (batch, _) = MODELS["llama"](), _batches()
    losses, smoother = [], LabelSmoother(epsilon=0.1)
    for memory in ({}, {"loss": "sliced", "recompute": "all"}):
        model.zero_grad()
        tide = lowtide.apply(model, memory)
        loss = smoother(model(input_ids=batch["input_ids"]), batch["labels"], shift_labels=True)
        loss.backward()
        losses.append({"loss": loss.detach()} | {key: p.grad for key, p in model.named_parameters()})
        if memory:
            with pytest.warns(UserWarning, match="nothing was sliced") as caught:
                tide.remove()
            assert [str(each.message) for each in caught] == [
                "lowtide: memory.loss: nothing was sliced: no forward pass of LlamaForCausalLM called its "
                "loss_function; give it labels, or call lowtide.cross_entropy in a training loop of your own"
            ]
        else:
            tide.remove()
    _assert_same(*losses)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(MODELS["llama"](), {"loss": "slice"})
    assert str(caught.value) == (
        "memory.loss: expected auto, sliced, plain, a mapping or null, not 'slice'; did you mean 'sliced'?"
    )
