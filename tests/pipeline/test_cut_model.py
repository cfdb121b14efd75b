"""Stages cut out of models of transformers: loss and gradients of the whole model, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen3MoeConfig,
)

from examples.train.stages import loss_function
from lowtide.errors import ConfigError
from lowtide.pipeline.cut_model import cut, loss_of
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import layers_of_stages
from tests.support.zoo import same_bits

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama, tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SMALL,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}
NUM_MICRO_BATCHES = 5


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).train()


@pytest.mark.parametrize("name", CONFIGS)
def test_stages_give_the_bits_of_the_whole_model(name: str) -> None:
    model = _model(name)
    whole = copy.deepcopy(model)
    tied = name.endswith("tied")
    if tied:  # the uses of one process are added apart too: docs/decisions/0018
        whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().clone())
    texts, wanted = _trained(whole)
    if tied:
        embedding = whole.model.embed_tokens.weight
        embedding.grad = embedding.grad + whole.lm_head.weight.grad
    _assert_same(model, whole, texts, wanted)


def _trained(whole: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Texts, and what one process gets of them: losses, and gradients in `whole`."""
    texts = [torch.randint(0, 64, (2, 7 + number)) for number in range(NUM_MICRO_BATCHES)]
    wanted = []
    for tokens in texts:
        loss = whole(input_ids=tokens, labels=tokens).loss
        loss.backward()
        wanted.append(loss.detach())
    return texts, wanted


def _assert_same(model: Any, whole: Any, texts: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Stages of `model` give these losses, and the gradients of `whole`."""
    schedule = make_schedule("dualpipev", num_ranks=1, num_micro_batches=NUM_MICRO_BATCHES)
    stages = dict(enumerate(cut(model, layers_of_stages(4, schedule.num_stages))))
    losses = Pipeline(schedule, stages, loss=loss_of).step(texts, texts, divide_by=1)
    assert all(same_bits(*pair) for pair in zip(losses, wanted, strict=True))
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for place, parameter in model.named_parameters():
        assert (parameter.grad is None) == (gradients[place] is None), place
        assert parameter.grad is None or same_bits(parameter.grad, gradients[place]), place


def test_the_loss_after_the_last_stage_may_be_sliced() -> None:
    """A vocabulary that is large enough; `memory.loss` of a run that is trained as a pipeline."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 128, 16_411, generator=generator)
    tokens, results = torch.randint(16_411, (2, 128), generator=generator), []
    for may_slice in (False, True):
        logits = numbers.clone().requires_grad_()
        loss = loss_function(may_slice=may_slice)(logits, tokens)
        loss.backward()
        results.append((loss.detach(), logits.grad))
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


def test_stages_have_the_parameters_of_the_model_and_no_others() -> None:
    model = _model("llama")
    stages = cut(model, [range(1), range(1, 4)])
    held = [parameter for stage in stages for parameter in stage.parameters()]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}
    assert len(held) == len(list(model.parameters()))
    assert [len(stage.model.layers) for stage in stages] == [1, 3]
    assert len(model.model.layers) == 4


class _Added(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + output.logits.square().mean()
        return output


class _Scaled(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, torch.ones(32, requires_grad=True)


def _skips_layers(model: Any) -> None:
    model.config.num_hidden_layers = 2


def _is_of_another_class(model: Any) -> None:
    model.__class__ = _Added


def _has_a_forward(model: Any) -> None:
    model.forward = model.forward


def _has_hooks(model: Any) -> None:
    model.model.register_forward_hook(lambda module, given, output: None)


def _has_backward_hooks(model: Any) -> None:
    model.model.register_full_backward_hook(lambda module, given, output: None)


def _trains_another_tensor(model: Any) -> None:
    model.model.layers[3].mlp = _Scaled(model.model.layers[3].mlp)


def _shares_a_list(model: Any) -> None:
    """In which each layer leaves a loss."""
    model.model.layers[1].mlp.found = model.model.layers[2].mlp.found = []


_ADDS = (
    ", and what it adds to the forward of the whole model no stage would compute. Take it off, put it into a layer or "
    "into the loss, or give Pipeline stages of your own"
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            _skips_layers,
            "config.num_hidden_layers is 2, and the model has 4 layers, of which it runs so many; make both the same",
        ),
        (_is_of_another_class, f"the model is of class _Added, which is not transformers' own{_ADDS}"),
        (_has_a_forward, f"the model has a forward of its own{_ADDS}"),
        (_has_hooks, f"model.model has hooks{_ADDS}"),
        (_has_backward_hooks, f"model.model has hooks{_ADDS}"),
        (
            _trains_another_tensor,
            "'model.layers.3.mlp.scale' requires a gradient and is no parameter, so stages would have copies of it; "
            "make it an nn.Parameter",
        ),
        (
            _shares_a_list,
            "'model.layers.1.mlp.found' and 'model.layers.2.mlp.found' are one empty list, of which each stage would "
            "fill a copy; give each layer its own, or one tuple to all if it is only read",
        ),
    ],
)
def test_what_stages_would_not_compute_is_refused(change: Callable[[Any], None], text: str) -> None:
    """Each of them gave other losses or gradients than the whole model, without a word."""
    model = _model("llama")
    change(model)
    with pytest.raises(ConfigError) as caught:
        cut(model, [range(2), range(2, 4)])
    assert str(caught.value) == f"pipeline: {text}"


def _has_a_norm_without_weights(model: Any) -> None:
    model.model.norm = torch.nn.LayerNorm(32, elementwise_affine=False)


class _Table(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, table: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.inner(x + self.table[: x.shape[1]])
        return added


def _shares_a_table(model: Any) -> None:
    table = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    for number in (0, 3):
        model.model.layers[number].mlp = _Table(model.model.layers[number].mlp, table)


def _has_lists_of_its_own(model: Any) -> None:
    """Within one stage; and settings in all, as adapters have them."""
    model.model.layers[0].mlp.found = model.model.layers[1].mlp.found = []
    model.model.layers[0].mlp.read = model.model.layers[3].mlp.read = ["default"]


def _has_checkpoints(model: Any) -> None:
    model.gradient_checkpointing_enable()


@pytest.mark.parametrize(
    "change", [_has_a_norm_without_weights, _shares_a_table, _has_lists_of_its_own, _has_checkpoints]
)
def test_habits_keep_the_bits(change: Callable[[Any], None]) -> None:
    model, whole = _model("llama"), _model("llama")
    change(model)
    change(whole)
    texts, wanted = _trained(whole)
    _assert_same(model, whole, texts, wanted)


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        cut(AutoModelForCausalLM.from_config(MistralConfig(**SMALL)), [range(4)])
    assert str(caught.value) == (
        "pipeline: a model of kind 'mistral' cannot be cut into stages; known are llama, qwen3_moe, deepseek_v3. Give "
        "Pipeline stages of your own"
    )
    with pytest.raises(ConfigError) as caught:
        cut(_model("llama"), [range(3)])
    assert str(caught.value) == "pipeline: the model has 4 layers, and the stages have [[0, 1, 2]]"
    model = _model("qwen3_moe")
    model.config.output_router_logits = True
    with pytest.raises(ConfigError) as caught:
        cut(model, [range(4)])
    assert str(caught.value) == (
        "pipeline: output_router_logits adds router losses of all layers, which no stage has; turn it off"
    )
