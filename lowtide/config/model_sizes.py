"""Sizes of a model that cannot be: widths below 1, heads that do not divide, more experts for a token than there are.

Why: the model library builds most of them without a word, and a plan for a model that cannot be trained is a wrong
answer. Not covered: what the library refuses itself; how a width fits the device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_AT_LEAST_1 = re.compile(
    r"hidden_size|n_embd|d_model|embedding_size|vocab_size|max_position_embeddings|n_positions|n_ctx|kv_lora_rank|q_lora_rank"
    r"|(\w+_)?intermediate_size|n_inner|ffn_dim|num_attention_heads|n_head|num_key_value_heads|(\w+_)?head_dim"
    r"|num_experts_per_tok|n_group|topk_group"
)
_HEADS, _WIDTHS = ("num_attention_heads", "n_head"), ("hidden_size", "n_embd", "d_model")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def size_mistake(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key of a model's config whose value cannot be, and what is wrong with it; None where all can."""
    sizes = {key: value for key, value in fields.items() if isinstance(value, int) and not isinstance(value, bool)}
    for key, value in sizes.items():
        if value < 1 and _AT_LEAST_1.fullmatch(key):
            return key, f"must be at least 1, not {value}"
    heads, width, experts = (_first(names, sizes) for names in (_HEADS, _WIDTHS, _EXPERTS))
    has_head_dim = any(key.endswith("head_dim") for key in sizes)
    if heads and width and not has_head_dim and sizes[width] % sizes[heads]:
        return heads, f"is {sizes[heads]}, which does not divide '{width}' of {sizes[width]}"
    shared = sizes.get("num_key_value_heads")
    if heads and shared and sizes[heads] % shared:
        return "num_key_value_heads", f"is {shared}, which does not divide '{heads}' of {sizes[heads]}"
    chosen = sizes.get("num_experts_per_tok", 0)
    if experts and 0 < sizes[experts] < chosen:
        return "num_experts_per_tok", f"is {chosen}, and there are {sizes[experts]} experts ('{experts}')"
    groups = sizes.get("n_group")
    if groups and experts and sizes[experts] % groups:
        return "n_group", f"is {groups}, which does not divide '{experts}' of {sizes[experts]}"
    if groups and sizes.get("topk_group", 0) > groups:
        return "topk_group", f"is {sizes['topk_group']}, and there are {groups} groups ('n_group')"
    return None


def _first(names: tuple[str, ...], sizes: Mapping[str, int]) -> str | None:
    return next((name for name in names if name in sizes), None)
