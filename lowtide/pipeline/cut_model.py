"""A causal language model of transformers, cut into stages that are modules of their own.

What: stage s is a copy of the inner model with the layers of s and the very same tensors. The first one has the
embedding, the others take the hidden state in its place; the last one has the final norm and the head, and gives
logits.
Each runs the forward that the model's authors wrote, so masks and positions are theirs.
Why not our own forward for each kind of model: it would have to follow every change of transformers.
Weights that several stages have (tied embeddings, layers that share parts) are found here, and kept equal by `Pipeline`
(gradients.py).
Names: the parameter `model.layers.5.mlp.up_proj.weight` of a stage that begins with layer 4 is
`model.layers.1.mlp.up_proj.weight` there.

Cost: the modules a second time, without their parameters; masks and positions once in each stage.
Not covered: models whose forward knows a layer by its number (sliding windows in some layers only), or adds to the loss
what layers gave out (router losses); keys and values kept for generating; kinds of models beside `KINDS`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError, did_you_mean
from lowtide.pipeline.gradients import Tie, find_ties
from lowtide.tensors.private import BACKWARD_HOOKS, FORWARD_HOOKS

KINDS = ("llama", "qwen3_moe", "deepseek_v3")
"""Values of `config.model_type` for which tests show that stages give the bits of the whole model."""


class Stage(nn.Module):
    """Some layers of the model. Takes token numbers or a hidden state; gives a hidden state or logits."""

    origin: tuple[dict[str, str], tuple[Tie, ...]]
    """Of the model that it was cut from: fields of its configuration, which all ranks must have in common, and the
    weights that several stages have."""

    def __init__(self, model: nn.Module, head: nn.Module | None, *, is_first: bool) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.is_first = is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        hidden: torch.Tensor = self.model(**given, use_cache=False).last_hidden_state
        return hidden if self.head is None else self.head(hidden)


def cut(model: Any, layers: Sequence[range]) -> list[Stage]:
    """The stages, whose layers are those of `layers` (`schedule.layers_of_stages` gives equal ones). Parameters are the
    model's own: training a stage trains the model. Raises ConfigError for a model that cannot be cut."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in KINDS:
        raise ConfigError(
            f"pipeline: a model of kind '{kind}' cannot be cut into stages{did_you_mean(str(kind), KINDS)}; known are "
            f"{', '.join(KINDS)}. Give Pipeline stages of your own"
        )
    if not hasattr(getattr(model, "model", None), "layers"):
        inside = "model.get_base_model()" if hasattr(model, "get_base_model") else "the model that is inside it"
        raise ConfigError(f"pipeline: {type(model).__name__} has no model.layers to cut; cut {inside} instead")
    layers = list(layers)
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            "pipeline: output_router_logits adds router losses of all layers, which no stage has; turn it off"
        )
    _refuse_what_no_stage_runs(model, {f"model.layers.{n}": stage for stage, own in enumerate(layers) for n in own})
    num_layers = len(model.model.layers)
    if model.config.num_hidden_layers != num_layers:
        raise ConfigError(
            f"pipeline: config.num_hidden_layers is {model.config.num_hidden_layers}, and the model has {num_layers} "
            "layers, of which it runs so many; make both the same"
        )
    if [number for each in layers for number in each] != list(range(num_layers)):
        raise ConfigError(f"pipeline: the model has {num_layers} layers, and the stages have {list(map(list, layers))}")
    last = len(layers) - 1
    stages = [
        Stage(_part(model.model, own, is_first=number == 0, is_last=number == last), head, is_first=number == 0)
        for number, own in enumerate(layers)
        for head in [model.lm_head if number == last else None]
    ]
    fields = {f"model fields: '{name}'": str(value) for name, value in model.config.to_dict().items()}
    origin = fields, find_ties(stages)
    for stage in stages:
        stage.origin = origin
    return stages


def _refuse_what_no_stage_runs(model: Any, stage_of: Mapping[str, int]) -> None:
    """ConfigError where not only the forwards of transformers run (each stage runs the inner one, none the outer one),
    and for what stages would have copies of: a trained tensor; an empty list (or the like) that two of them have. Full
    ones are often settings."""
    for name, module in (("the model", model), ("model.model", model.model)):
        why = "has hooks" if any(getattr(module, hooks) for hooks in (*FORWARD_HOOKS, *BACKWARD_HOOKS)) else ""
        if not type(module).__module__.startswith("transformers.models."):
            why = f"is of class {type(module).__name__}, which is not transformers' own"
        elif "forward" in vars(module):
            why = "has a forward of its own"
        if why:
            raise ConfigError(
                f"pipeline: {name} {why}, and what it adds to the forward of the whole model no stage would compute. "
                "Take it off, put it into a layer or into the loss, or give Pipeline stages of your own"
            )
    seen: dict[int, tuple[int | None, str]] = {}
    for name, module in model.named_modules():
        stage = stage_of.get(".".join(name.split(".")[:3]))
        for key in sorted(vars(module).keys() - vars(nn.Module()).keys()):
            value = vars(module)[key]
            first, other = seen.setdefault(id(value), (stage, f"{name}.{key}"))
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise ConfigError(
                    f"pipeline: '{name}.{key}' requires a gradient and is no parameter, so stages would have copies of "
                    "it; make it an nn.Parameter"
                )
            if isinstance(value, list | dict | set | deque) and not value and first != stage:
                raise ConfigError(
                    f"pipeline: '{other}' and '{name}.{key}' are one empty {type(value).__name__}, of which each stage "
                    "would fill a copy; give each layer its own, or one tuple to all if it is only read"
                )


def _part(inner: nn.Module, own: range, *, is_first: bool, is_last: bool) -> nn.Module:
    shared = {id(tensor): tensor for tensor in (*inner.parameters(), *inner.buffers())}
    part: Any = copy.deepcopy(inner, shared)
    part.layers = nn.ModuleList([part.layers[number] for number in own])
    if not is_first:
        part.embed_tokens = None
    if not is_last:
        part.norm = nn.Identity()
    return part


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each token, given those before it, as the models above compute it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = ForCausalLMLoss(logits, tokens, vocab_size=logits.shape[-1])
    return loss
