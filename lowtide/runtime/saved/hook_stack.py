"""Which saved-tensor hooks are active, and who set them."""

from __future__ import annotations

from collections.abc import Callable


def is_checkpoint_hook(hooks: tuple[Callable, Callable] | None) -> bool:
    """Whether these saved-tensor hooks are those of a `torch.utils.checkpoint` region (forward or recompute)."""
    if hooks is None:
        return False
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint" or (
        "checkpoint" in getattr(hooks[0], "__qualname__", "") and "_hook" in getattr(hooks[0], "__qualname__", "")
    )
