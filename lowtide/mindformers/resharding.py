"""`parallel_optimizer_comm_recompute`: whether the parameters of recomputed layers are gathered again in backward.

What: after a module's forward FSDP2 either shards its parameters again (and gathers them a second time before the
backward), or keeps them whole until then. In recomputed layers true asks for the first, false for the second. Where the
file does not have the key, FSDP2 stays as the user built it. `undo` gives each module its own setting back.
Why here: what reads these parameters in backward is the layer that runs again.
Cost of true: one all-gather a layer and step; of false: the layer's parameters from forward to backward.
Not covered: recomputed single ops, and modules that shard several layers as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lowtide.mindformers.schema import Resolution
from lowtide.mindformers.schema.issues import layers_text
from lowtide.tensors.fsdp import after_forward, fsdp_modules

KEY = "parallel_optimizer_comm_recompute"


class Resharding:
    """The setting of the FSDP2 modules in recomputed layers. In force until `undo()`."""

    def __init__(self, model: nn.Module, resolution: Resolution, layers: Sequence[str]) -> None:
        self.notes: list[str] = []
        """Lines that say what has no effect, and why."""
        self._before: list[tuple[Any, str, Any]] = []
        # In a stage of a pipeline, plans have the whole model's layer numbers, and names have the stage's own.
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
        """Give each module its own setting back. Idempotent."""
        for owner, name, value in self._before:
            setattr(owner, name, value)
        self._before.clear()
