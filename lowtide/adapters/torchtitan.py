"""torchtitan: lowtide in the place of its activation checkpointing.

    from lowtide.adapters.torchtitan import with_lowtide
    def llama3_8b_lowtide():
        return with_lowtide(llama3_8b(), budget="20GiB")

What: `with_lowtide` takes a `Trainer.Config`, and gives it back with lowtide in two places. `activation_checkpoint` is
a `TideInPlace`; torchtitan calls its `build(...).apply(model)` where it would checkpoint the blocks, and it leaves the
blocks plain. torchtitan calls `model_spec.post_optimizer_build_fn` when the model is sharded and initialized and the
optimizer is there; lowtide plans the model then (or applies the rules of `memory=`). A function that was there before
runs first.

Why two: torchtitan checkpoints a model on the meta device, before it is sharded and before there is an optimizer. A
plan needs both. If only the first place was called, the first forward pass says so.

This file imports nothing of torchtitan: it has the shape that its protocol asks for (seen in version 0.3).
Not covered: pipeline parallelism (refused), several optimizers for one model (refused), CUDA graphs (lowtide refuses
the capture by name: set `training.disable_cuda_graphs`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide import ConfigError
from lowtide.adapters.attach import Attached, shown


def with_lowtide(
    config: Any,
    *,
    budget: int | str | None = None,
    memory: Mapping[str, Any] | str | os.PathLike[str] | Any = None,
    engine: Any = None,
    say: Callable[[str], None] | None = None,
) -> Any:
    """`config`, a torchtitan `Trainer.Config`, changed in place and given back: lowtide acts on what it trains.

    `budget`, `memory`, `engine`, `say`: as for `lowtide.adapters.transformers.TideCallback`. The handle, once there is
    one, is `config.activation_checkpoint.tide`. Raises ConfigError for a wish that asks for nothing.
    """
    attached = Attached("with_lowtide", budget=budget, memory=memory, engine=engine, say=say)
    place = TideInPlace(attached)
    config.activation_checkpoint = place
    spec = config.model_spec
    attach = functools.partial(place.attach_after, spec.post_optimizer_build_fn)
    config.model_spec = dataclasses.replace(spec, post_optimizer_build_fn=attach)
    return config


class TideInPlace:
    """What stands in `activation_checkpoint`. `tide` is the handle, `stats` its figures; None before training."""

    tide, stats = shown("tide"), shown("stats")

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self._reminder: Any = None

    def build(self, **given: Any) -> TideInPlace:
        """As torchtitan's configs build a policy. There is nothing to be built."""
        return self

    def apply(self, model: nn.Module) -> None:
        """torchtitan's call to apply activation checkpointing. lowtide is applied later, when there is an optimizer."""
        self._reminder = model.register_forward_pre_hook(_never_attached)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The model is as it will be trained: act on it. Raises what `lowtide.optimize` does."""
        if self._reminder is not None:
            self._reminder.remove()
            self._reminder = None
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.attached.attach(model, optimizer, speaks=is_first)

    def attach_after(
        self,
        before: Callable[..., None] | None,
        optimizers: Iterable[torch.optim.Optimizer],
        model_parts: Sequence[nn.Module],
        dims: Any,
    ) -> None:
        """As a `post_optimizer_build_fn`, with torchtitan's arguments: attaches, after what stood there has run. Raises
        ConfigError for a setting that is not covered."""
        if before is not None:
            before(optimizers, model_parts, dims)
        if getattr(dims, "pp_enabled", False) or len(model_parts) != 1:
            raise ConfigError(
                "with_lowtide: pipeline parallelism is not covered; write parallelism.pipeline_parallel_degree=1, or "
                "give each stage a plan of its own with lowtide.optimize(stage, group=...)"
            )
        found = list(optimizers)
        if len(found) != 1:
            raise ConfigError(f"with_lowtide: needs one optimizer, and there are {len(found)}")
        self.attach(model_parts[0], found[0])

    def remove(self) -> None:
        """Make the model plain again. Idempotent."""
        self.attached.remove()

    def to_dict(self) -> dict[str, Any]:
        """As torchtitan's configs, for its log of a run."""
        budget, memory = self.attached.budget, self.attached.memory
        return {"lowtide": {"budget": budget, "memory": memory if isinstance(memory, str | dict) else repr(memory)}}


def _never_attached(model: nn.Module, args: tuple) -> None:
    raise ConfigError(
        "with_lowtide: lowtide stands in activation_checkpoint, and was never given the optimizer, so nothing would be "
        "planned; keep model_spec.post_optimizer_build_fn as with_lowtide has set it"
    )
