"""The same part of a layer in three namings, and who reads its output.

What: one `Role` for each part that a person may want to recompute or swap: its names in MindSpore Transformers' older
models (`legacy`), in its newer ones (`mcore`), and in Hugging Face models as lowtide names sites (`hf`). All names are
relative to the layer. `readers` are the roles that read the output in the forward pass.
Why: a MindSpore Transformers file names MindSpore modules; the model at hand is a Hugging Face one. And a swapped
output whose reader is recomputed stays on the device, so somebody has to know the readers.

Covers Llama and its family (Mistral, Qwen2, Qwen3), Qwen MoE and DeepSeek-V3 (latent attention, shared and routed
experts). Some parts are no module in Hugging Face models but a function call: the attention kernel (`self_attn.sdpa`)
and the product of the gated MLP (`mlp.mul`); `FUNCTIONS` says next to which module each is found.
Not covered: models with other block structures; their names are matched as written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["legacy", "mcore", "hf", "other"]
FAMILIES: tuple[Family, ...] = ("hf", "mcore", "legacy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One part of a layer."""

    name: str
    legacy: tuple[str, ...] = ()
    mcore: tuple[str, ...] = ()
    hf: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()

    def names(self, family: str) -> tuple[str, ...]:
        return {"legacy": self.legacy, "mcore": self.mcore, "hf": self.hf}.get(family, ())

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.legacy, *self.mcore, *self.hf)


def _linear(name: str) -> tuple[str, ...]:
    """A linear layer of the older models and the operators in it."""
    return (name, f"{name}.matmul", f"{name}.bias_add")


def _under(module: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"{module}.{part}" for part in parts) if module else ()


def _mlp(key: str, *, legacy: str = "", mcore: str = "", hf: str = "", readers: tuple[str, ...] = ()) -> list[Role]:
    """A gated MLP: `down(act(gate(x)) * up(x))`. In the older models `w1` is the gate and owns the activation."""

    def role(name: str, old: tuple, new: tuple, ours: tuple, below: tuple[str, ...]) -> Role:
        names = {"legacy": _under(legacy, *old), "mcore": _under(mcore, *new), "hf": _under(hf, *ours)}
        return Role(name=f"{key}{name}", **names, readers=below)

    act, mul, down = f"{key}act", f"{key}mul", f"{key}down"
    return [
        role("gate_act", ("w1",), (), ("gate_proj", "act_fn"), (mul,)),
        role("gate", ("w1.matmul", "w1.bias_add"), (), ("gate_proj",), (act,)),
        role(
            "gate_up",
            ("w_gate_hidden", "w13_concat"),
            ("linear_fc1", "linear_fc1.matmul"),
            ("gate_proj", "up_proj"),
            (act, mul),
        ),
        role(
            "act",
            ("w1.activation", "w1.activation.silu", "activate.silu"),
            ("activation_func", "activation_func.silu"),
            ("act_fn",),
            (mul,),
        ),
        role("up", _linear("w3"), (), ("up_proj",), (mul,)),
        role("mul", ("mul",), ("mul",), ("mul",), (down,)),
        role("down", _linear("w2"), ("linear_fc2", "linear_fc2.matmul"), ("down_proj",), readers),
    ]


LLAMA = (
    Role(
        name="input_norm",
        legacy=("attention_norm", "attention_norm.norm"),
        mcore=("input_layernorm", "input_layernorm.norm"),
        hf=("input_layernorm",),
        readers=("q", "k", "v", "qkv", "q_down", "kv_down"),
    ),
    Role(name="attention", legacy=("attention",), mcore=("self_attention",), hf=("self_attn",), readers=("add",)),
    Role(name="q", legacy=_linear("attention.wq"), hf=("self_attn.q_proj",), readers=("q_norm", "rope", "sdpa")),
    Role(name="k", legacy=_linear("attention.wk"), hf=("self_attn.k_proj",), readers=("k_norm", "rope", "sdpa")),
    Role(name="v", legacy=_linear("attention.wv"), hf=("self_attn.v_proj",), readers=("sdpa",)),
    Role(
        name="qkv",
        legacy=_linear("attention.w_qkv"),
        mcore=("self_attention.linear_qkv", "self_attention.linear_qkv.matmul"),
        hf=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        readers=("q_norm", "k_norm", "rope", "sdpa"),
    ),
    Role(
        name="rope",
        legacy=("attention.apply_rotary_emb",),
        mcore=("self_attention.apply_rotary_pos_emb",),
        hf=("self_attn.add",),
        readers=("sdpa",),
    ),
    Role(
        name="sdpa",
        legacy=("attention.flash_attention", "attention.flash_attention.flash_attention"),
        mcore=("self_attention.core_attention", "self_attention.core_attention.flash_attention"),
        hf=("self_attn.sdpa",),
        readers=("o",),
    ),
    Role(
        name="o",
        legacy=_linear("attention.wo"),
        mcore=("self_attention.linear_proj", "self_attention.linear_proj.matmul"),
        hf=("self_attn.o_proj",),
        readers=("add",),
    ),
    Role(name="add", legacy=("add",), mcore=("add",), hf=("add",), readers=("post_norm",)),
    Role(
        name="post_norm",
        legacy=("ffn_norm", "ffn_norm.norm"),
        mcore=("pre_mlp_layernorm", "pre_mlp_layernorm.norm"),
        hf=("post_attention_layernorm",),
        readers=("mlp", "gate", "gate_act", "gate_up", "up", "router", "experts", "shared"),
    ),
    Role(name="mlp", legacy=("feed_forward",), mcore=("mlp",), hf=("mlp",), readers=("add",)),
    *_mlp("", legacy="feed_forward", mcore="mlp", hf="mlp", readers=("add",)),
)

_QWEN = (
    Role(name="q_norm", mcore=("self_attention.q_layernorm",), hf=("self_attn.q_norm",), readers=("rope", "sdpa")),
    Role(name="k_norm", mcore=("self_attention.k_layernorm",), hf=("self_attn.k_norm",), readers=("rope", "sdpa")),
    Role(name="shared", mcore=("mlp.shared_experts",), hf=("mlp.shared_expert",)),
    *_mlp("shared:", mcore="mlp.shared_experts", hf="mlp.shared_expert"),
)

_DEEPSEEK = (
    Role(
        name="q_down",
        legacy=_linear("attention.q2l_proj"),
        mcore=("self_attention.linear_q_down_proj",),
        hf=("self_attn.q_a_proj",),
        readers=("q_down_norm",),
    ),
    Role(
        name="q_down_norm",
        legacy=("attention.lq_norm", "attention.lq_norm.norm"),
        mcore=("self_attention.q_layernorm",),
        hf=("self_attn.q_a_layernorm",),
        readers=("q_up",),
    ),
    Role(
        name="q_up",
        legacy=(*_linear("attention.l2q_nope_proj"), *_linear("attention.l2q_pe_proj")),
        mcore=("self_attention.linear_q_up_proj", "self_attention.linear_qb"),
        hf=("self_attn.q_b_proj",),
        readers=("rope", "sdpa"),
    ),
    Role(
        name="kv_down",
        legacy=(*_linear("attention.kv2l_latent_kv"), *_linear("attention.kv2l_k_pe")),
        mcore=("self_attention.linear_kv_down_proj",),
        hf=("self_attn.kv_a_proj_with_mqa",),
        readers=("kv_down_norm",),
    ),
    Role(
        name="q_kv_down",
        mcore=("self_attention.linear_qkv",),
        hf=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        readers=("q_down_norm", "kv_down_norm"),
    ),
    Role(
        name="kv_down_norm",
        legacy=("attention.lkv_norm", "attention.lkv_norm.norm"),
        mcore=("self_attention.kv_layernorm", "self_attention.k_layernorm"),
        hf=("self_attn.kv_a_layernorm",),
        readers=("kv_up",),
    ),
    Role(
        name="kv_up",
        legacy=(*_linear("attention.lkv2kv_k_nope"), *_linear("attention.lkv2kv_v")),
        mcore=("self_attention.linear_kv_up_proj", "self_attention.linear_kvb"),
        hf=("self_attn.kv_b_proj",),
        readers=("sdpa",),
    ),
    Role(
        name="router",
        legacy=("feed_forward.routed_experts.router",),
        mcore=("mlp.router",),
        hf=("mlp.gate",),
        readers=("experts",),
    ),
    Role(name="experts", mcore=("mlp.experts",), hf=("mlp.experts",)),
    Role(name="experts_router", legacy=("feed_forward.routed_experts",), hf=("mlp.experts", "mlp.gate")),
    Role(
        name="shared",
        legacy=("feed_forward.shared_experts",),
        mcore=("mlp.shared_experts",),
        hf=("mlp.shared_experts",),
    ),
    *_mlp("shared:", legacy="feed_forward.shared_experts", mcore="mlp.shared_experts", hf="mlp.shared_experts"),
    Role(name="experts_mlp", legacy=("feed_forward.routed_experts.ffn",), hf=("mlp.experts",)),
    *_mlp("routed:", legacy="feed_forward.routed_experts.ffn", hf="mlp.experts", readers=("experts",)),
)

ROLES: tuple[Role, ...] = (*LLAMA, *_QWEN, *_DEEPSEEK)

FUNCTIONS: Mapping[str, str] = {
    "self_attn.sdpa": "self_attn",
    "self_attn.add": "self_attn",
    "mlp.mul": "mlp.act_fn",
    "mlp.shared_expert.mul": "mlp.shared_expert",
    "mlp.shared_experts.mul": "mlp.shared_experts",
    "mlp.experts.mul": "mlp.experts.act_fn",
    "add": "mlp",
}
"""Function calls of Hugging Face models -> the module that must be there for the call to be."""

FREE_OPS = frozenset({"reshape", "shape", "transpose", "cast", "rcast", "cast_attn", "merger_head_transpose"})
"""Operators of MindSpore that are a view or an autocast in PyTorch: there is nothing of their own to save."""


def layer_tree(model_type: str) -> dict[str, Any] | None:
    """What a layer of a kind of model consists of, in Hugging Face names; None for a kind that is not known here.

    `model_type` is written as either side does: `llama`, `LlamaConfig`, `LlamaForCausalLM`. Layers that differ (dense
    ones among layers of experts) are one tree with the parts of both.
    """
    kind = model_type.lower().replace("_", "").removesuffix("config").removesuffix("forcausallm")
    if not kind.startswith(("llama", "mistral", "qwen", "mixtral", "deepseek", "parallelllama")):
        return None
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    mlp = ["gate_proj", "up_proj", "down_proj", "act_fn"]
    if kind.startswith("qwen3"):
        attention += ["q_norm", "k_norm"]
    if kind.startswith("deepseek"):
        attention = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"]
        attention.append("o_proj")
    tree: dict[str, Any] = {
        "input_layernorm": {},
        "self_attn": {name: {} for name in attention},
        "post_attention_layernorm": {},
        "mlp": {name: {} for name in mlp},
    }
    if kind.startswith(("deepseek", "mixtral")) or "moe" in kind:
        tree["mlp"] |= {"gate": {}, "experts": {"act_fn": {}}}
    if kind.startswith("deepseek"):
        tree["mlp"]["shared_experts"] = {name: {} for name in mlp}
    if kind.startswith("qwen2moe"):
        tree["mlp"]["shared_expert"] = {name: {} for name in mlp}
    return tree


def family_of(tree: Mapping[str, Any] | None) -> Family:
    """Which naming a layer uses, seen by the names right below it."""
    if tree is None:
        return "other"
    if "self_attn" in tree:
        return "hf"
    if "self_attention" in tree:
        return "mcore"
    return "legacy" if tree.keys() & {"attention", "feed_forward", "attention_norm"} else "other"
