"""`parallel_optimizer_comm_recompute`: whether the parameters of recomputed layers are gathered again in backward.

What: FSDP2 shards the parameters of a module again after its forward (and gathers them a second time before its
backward), or keeps them whole in between. True asks for the first in recomputed layers, false for the second; where the
file says nothing, FSDP2 is left as the user built it. `undo` gives each module its own setting back.
Why here: the reader of these parameters in backward is the layer that is run again.
Cost of true: one all-gather a layer and step; of false: the layer's parameters from forward to backward.
Not covered: recomputed single ops, and modules that shard several layers as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lowtide.catalog.sharded import after_forward, fsdp_modules
from lowtide.config.mindformers import Resolution
from lowtide.config.mindformers.issues import layers_text

KEY = "parallel_optimizer_comm_recompute"


class Resharding:
    """The setting of the FSDP2 modules in recomputed layers. In force until `undo()`."""

    def __init__(self, model: nn.Module, resolution: Resolution, layers: Sequence[str]) -> None:
        self.notes: list[str] = []
        """What has no effect, and why."""
        self._before: list[tuple[Any, str, Any]] = []
        # Of a stage of a pipeline, plans have the numbers of the whole model, and names those of the stage.
        recomputed = [(plan.index, name) for plan, name in zip(resolution.layers, layers, strict=True)
                      if plan.full_recompute]  # fmt: skip
        if resolution.gathers_again is None or not recomputed:
            return
        if not fsdp_modules(model):
            if resolution.gathers_again:
                self.notes.append(f"no effect: {KEY}; no parameters are sharded by FSDP2 in this model")
            return
        found = {index: fsdp_modules(model.get_submodule(name)) for index, name in recomputed}
        for module in (module for modules in found.values() for module in modules):
            self._before += after_forward(module)
            module.set_reshard_after_forward(resolution.gathers_again, recurse=False)
        untouched = [index for index, modules in found.items() if not modules]
        if untouched:
            self.notes.append(f"no effect: {KEY} in {layers_text(untouched)}; no module there is sharded by itself")
        kept = [index for index, modules in found.items() if modules and not resolution.gathers_again]
        if kept:
            self.notes.append(
                f"{KEY} is false: the gathered parameters of {layers_text(kept)} stay on the device from forward to "
                "backward; true frees them"
            )

    def undo(self) -> None:
        """As the modules were. Idempotent."""
        for owner, name, value in self._before:
            setattr(owner, name, value)
        self._before.clear()
