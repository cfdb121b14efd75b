"""What a model is like, in numbers: widths, heads, experts, and which kind each layer is of.

What: `shape_of` reads the config of a causal language model of transformers by its field names. Known are dense
decoders with gated MLPs (llama, mistral, qwen2, qwen3), with a plain one (gpt_neox), mixtures of experts (mixtral,
qwen3_moe), and latent attention (deepseek_v3).
Why not a trace: the slice of a model that one of many ranks has, with its tensor, context and expert ranks, is no model
that could be traced. Products and saved activations are few enough to be written down (layer.py).

Not covered: biases and norms' weights (below 0.1 % of the parameters), heads for more than the next token, sliding
windows, vision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.errors import ConfigError

DENSE, MOE = "dense", "moe"
KNOWN = ("deepseek_v3", "gpt_neox", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of one layer."""

    num: int
    top_k: int
    inner: int
    shared_inner: int = 0
    """Of experts that every token goes to, all together; 0: none."""
    most_nodes: int | None = None
    """A token goes to experts of at most so many groups; None: of any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder. Widths are numbers of elements."""

    name: str
    hidden: int
    vocabulary: int
    kinds: tuple[str, ...]
    """Of each layer: `dense` or `moe`."""
    heads: int
    key_heads: int
    key_width: int
    """Of one head's query and key."""
    value_width: int
    inner: int
    """Of the MLP of dense layers."""
    is_gated: bool = True
    query_rank: int = 0
    """Width of the short vectors that queries come from; 0: they come straight from the hidden state."""
    key_rank: int = 0
    """Width of those that keys and values come from together (multi-head latent attention); 0: there are none."""
    rope_width: int = 0
    """The part of each key that then comes straight from the hidden state, one for all heads: it carries positions."""
    experts: Experts | None = None
    is_tied: bool = False
    """The output layer's weight is that of the embedding."""

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    def attention_parameters(self) -> int:
        """Of one layer, in matrices."""
        queries, out = self.heads * self.key_width, self.heads * self.value_width * self.hidden
        if not self.key_rank:
            return self.hidden * (queries + self.key_heads * (self.key_width + self.value_width)) + out
        into_queries = (self.query_rank or self.hidden) * queries
        return self.latent_parameters + into_queries + self.key_rank * self.up_columns + out

    @property
    def latent_parameters(self) -> int:
        """Of one layer, in the matrices that make short vectors: each tensor rank has them whole."""
        return self.hidden * (self.query_rank + self.key_rank + self.rope_width)

    @property
    def up_columns(self) -> int:
        """Of the matrix that makes keys and values from short vectors."""
        return self.heads * (self.key_width - self.rope_width + self.value_width)

    def mlp_parameters(self, inner: int) -> int:
        return (3 if self.is_gated else 2) * self.hidden * inner

    def layer_parameters(self, kind: str) -> tuple[int, int]:
        """(those that every rank of the layer has or splits by tensor ranks, those of routed experts), in matrices."""
        if kind == DENSE:
            return self.attention_parameters() + self.mlp_parameters(self.inner), 0
        assert self.experts is not None
        router = self.hidden * self.experts.num
        shared = self.mlp_parameters(self.experts.shared_inner)
        return self.attention_parameters() + router + shared, self.experts.num * self.mlp_parameters(self.experts.inner)

    @property
    def num_parameters(self) -> int:
        layers = sum(sum(self.layer_parameters(kind)) for kind in self.kinds)
        return layers + self.embedding_parameters * (1 if self.is_tied else 2)


def shape_of(config: Any) -> ModelShape:
    """The shape of a config of transformers. Raises `ConfigError` for a model that is not known."""
    kind = config.model_type
    if kind not in KNOWN:
        raise ConfigError(f"model: no cluster is planned for model_type '{kind}' yet; known are {', '.join(KNOWN)}")
    if kind == "gpt_neox" and getattr(config, "use_parallel_residual", False):
        raise ConfigError(
            "model: a cluster is planned for layers whose MLP follows the attention; write "
            "'use_parallel_residual: false', or leave this model to a plan for one device"
        )
    heads, hidden = config.num_attention_heads, config.hidden_size
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    key_width = value_width = getattr(config, "head_dim", None) or hidden // heads
    latent: dict[str, int] = {}
    if kind == "deepseek_v3":
        rope = config.qk_rope_head_dim
        key_heads, key_width, value_width = heads, config.qk_nope_head_dim + rope, config.v_head_dim
        latent = {"query_rank": config.q_lora_rank or 0, "key_rank": config.kv_lora_rank, "rope_width": rope}
    return ModelShape(
        name=kind,
        hidden=hidden,
        vocabulary=config.vocab_size,
        kinds=tuple(MOE if _has_experts(config, layer) else DENSE for layer in range(config.num_hidden_layers)),
        heads=heads,
        key_heads=key_heads,
        key_width=key_width,
        value_width=value_width,
        inner=config.intermediate_size,
        is_gated=kind != "gpt_neox",
        experts=_experts(config) if kind in _EXPERTS else None,
        is_tied=bool(config.tie_word_embeddings),
        **latent,
    )


_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
}
"""Kinds of models with experts, and the fields that say how many and how wide they are."""


def _experts(config: Any) -> Experts:
    num, inner = (getattr(config, field) for field in _EXPERTS[config.model_type])
    return Experts(
        num=num,
        top_k=config.num_experts_per_tok,
        inner=inner,
        shared_inner=(getattr(config, "n_shared_experts", 0) or 0) * inner,
        most_nodes=config.topk_group if (getattr(config, "n_group", 1) or 1) > 1 else None,
    )


def _has_experts(config: Any, layer: int) -> bool:
    if config.model_type == "deepseek_v3":
        return bool(layer >= config.first_k_dense_replace)
    if config.model_type == "qwen3_moe":
        return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    return config.model_type in _EXPERTS
