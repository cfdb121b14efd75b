"""Shapes: the parameters are those of transformers' own models, and what is not known is refused."""

from __future__ import annotations

import types
from typing import Any

import pytest

from lowtide.cluster.shape import DENSE, MOE, shape_of
from lowtide.errors import ConfigError

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "gpt_neox": {"use_parallel_residual": False},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "mlp_only_layers": [1], "num_key_value_heads": 2},
    "deepseek_v3": {"n_routed_experts": 8, "moe_intermediate_size": 96, "first_k_dense_replace": 1, "q_lora_rank": 48,
                    "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_model(kind: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    common = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
              "vocab_size": 1000, "pad_token_id": None}  # fmt: skip
    config = CONFIG_MAPPING[kind](**common, **KINDS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config)
    # Biases and norms are left out: little of a model this small, nothing of a large one.
    assert shape.num_parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
    expected = {"mixtral": (MOE,) * 3, "qwen3_moe": (MOE, DENSE, MOE), "deepseek_v3": (DENSE, MOE, MOE)}
    assert shape.kinds == expected.get(kind, (DENSE,) * 3)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        shape_of(types.SimpleNamespace(model_type="mamba"))
    assert str(error.value) == (
        "model: no cluster is planned for model_type 'mamba' yet; known are deepseek_v3, gpt_neox, llama, mistral, "
        "mixtral, qwen2, qwen3, qwen3_moe"
    )
