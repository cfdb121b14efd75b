"""Which modules of a model hold experts that can be split, and how they compute.

What: `find_experts` finds the experts of `transformers`' MoE blocks by the names of their classes: weights of all
experts in two parameters of three dimensions, called with rows, chosen experts and their weights. Experts of another
kind are refused by name: they may compute something else.
Cost: one walk over the modules. Not covered: experts that are a list of modules, as in versions of transformers before
5; experts with biases, norms or a gate of their own (gpt-oss, DeepSeek-V4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.errors import ConfigError
from lowtide.tensors.private import experts_implementation

KNOWN = ("Qwen3MoeExperts", "DeepseekV3Experts", "MixtralExperts")
"""Classes whose experts were compared with ours to the bit."""
_IMPLEMENTATIONS = {None: False, "eager": False, "grouped_mm": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundExperts:
    """The experts of one block."""

    name: str
    """Dotted, in the model."""
    block: nn.Module
    """The module that they are a child of."""
    attribute: str
    experts: Any
    is_grouped: bool
    """Whether the model runs them as one grouped product."""


def find_experts(model: nn.Module) -> list[FoundExperts]:
    """The experts of all blocks. Raises ConfigError: none is there, or one that is not known."""
    found = []
    for name, module in model.named_modules():
        above, _, attribute = name.rpartition(".")
        if attribute != "experts":
            continue
        kind = type(module).__name__
        if kind not in KNOWN or not type(module).__module__.startswith("transformers."):
            raise ConfigError(
                f"lowtide.pipeline.split_experts: '{name}' is of class {kind}; only the experts of transformers' "
                f"{', '.join(KNOWN)} can be split"
            )
        implementation = experts_implementation(module.config)
        if implementation not in _IMPLEMENTATIONS:
            raise ConfigError(
                f"lowtide.pipeline.split_experts: '{name}' runs by '{implementation}'; choose one that can be split: "
                'model.set_experts_implementation("grouped_mm") or "eager"'
            )
        found.append(
            FoundExperts(
                name=name,
                block=model.get_submodule(above),
                attribute=attribute,
                experts=module,
                is_grouped=_IMPLEMENTATIONS[implementation],
            )
        )
    if not found:
        raise ConfigError(
            f"lowtide.pipeline.split_experts: {type(model).__name__} has no experts; only the experts of transformers' "
            f"{', '.join(KNOWN)} can be split"
        )
    return found
