"""The same part of a layer in three namings, and who reads its output.

What: one `Role` for each part that a person may want to recompute or swap: its names in MindSpore Transformers' older
models (`legacy`), in its newer ones (`mcore`), and in Hugging Face models as lowtide names sites (`hf`). All names are
relative to the layer. `readers` are the roles that read the output in the forward pass. The table is roles.toml.
Why: a MindSpore Transformers file names MindSpore modules; the model at hand is a Hugging Face one. And a swapped
output whose reader is recomputed stays on the device, so somebody has to know the readers.

Covers Llama and its family (Mistral, Qwen2, Qwen3), Qwen MoE and DeepSeek-V3 (latent attention, shared and routed
experts). Some parts are no module in Hugging Face models but a function call: the attention kernel (`self_attn.sdpa`)
and the product of the gated MLP (`mlp.mul`); `FUNCTIONS` says next to which module each is found.
Not covered: models with other block structures; their names are matched as written.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
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


_READ = tomllib.loads((Path(__file__).parent / "roles.toml").read_text(encoding="utf-8"))
_TREES = _READ.pop("trees")
_BY_MODELS = {
    models: tuple(Role(name=name, **{key: tuple(names) for key, names in role.items()}) for name, role in roles.items())
    for models, roles in _READ.items()
}
"""The roles by the models that have them first."""
LLAMA = _BY_MODELS["llama"]
ROLES: tuple[Role, ...] = tuple(role for roles in _BY_MODELS.values() for role in roles)

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
    parts = [part for entry in _TREES for part in entry["parts"] if re.match(entry["kinds"], kind)]
    return tree_of(parts) if parts else None


def tree_of(names: Iterable[str]) -> dict[str, Any]:
    """Dotted names of modules as a tree."""
    tree: dict[str, Any] = {}
    for name in names:
        below = tree
        for piece in name.split("."):
            below = below.setdefault(piece, {})
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
