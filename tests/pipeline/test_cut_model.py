"""Stages cut out of models of transformers: loss and gradients of the whole model, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig, Qwen3MoeConfig

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
    texts = [torch.randint(0, 64, (2, 7 + number)) for number in range(NUM_MICRO_BATCHES)]
    wanted = []
    for tokens in texts:
        loss = whole(input_ids=tokens, labels=tokens).loss
        loss.backward()
        wanted.append(loss.detach())
    if tied:
        embedding = whole.model.embed_tokens.weight
        embedding.grad = embedding.grad + whole.lm_head.weight.grad
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
    assert loss_function(may_slice=False) is loss_of


def test_stages_have_the_parameters_of_the_model_and_no_others() -> None:
    model = _model("llama")
    stages = cut(model, [range(1), range(1, 4)])
    held = [parameter for stage in stages for parameter in stage.parameters()]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}
    assert len(held) == len(list(model.parameters()))
    assert [len(stage.model.layers) for stage in stages] == [1, 3]
    assert len(model.model.layers) == 4


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
