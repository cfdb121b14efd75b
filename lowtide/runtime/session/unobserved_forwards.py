"""What did not happen is said: gradients arrive, and the forward that lowtide wrapped was never called.

What: a trainer may call a part of the module that lowtide was given (`training_step` of a Lightning module calls
`self.model`), put another forward over the wrapped one, or run it where lowtide steps aside. Then nothing is planned,
and without a word nobody would know. `UnobservedForwards` puts a hook on each parameter until the first forward is
seen; when a backward pass ends before that, it warns once, by the names of the modules whose parameters got gradients.

Cost: two Python calls a parameter when a plan is applied (about 3 us), nothing after the first forward. Not covered:
gradients that autograd does not deliver itself (FSDP2's sharded parameters), a model whose parameters all are frozen.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.runtime.session.forward_patch import ForwardPatch
from lowtide.tensors.private import queue_callback

_MAX_NAMES = 3


class UnobservedForwards:
    """Waits for the first forward of `model`, which the function `call` has wrapped."""

    def __init__(self, model: nn.Module, call: str) -> None:
        self._model = model
        self._call = call
        self._found: list[str] = []
        self._is_waiting = True
        self.was_aside = False
        """The forward was called, where lowtide steps aside."""
        me = weakref.ref(self)
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad and not is_lazy(p))
        self._hooks = [parameter.register_hook(_hook(me, name)) for name, parameter in trained]

    def end(self) -> None:
        """The forward was seen, or nobody waits for it any more. Idempotent."""
        if self._is_waiting:
            self.close()

    def close(self) -> None:
        """Take all hooks off, for good."""
        self._is_waiting = False
        for hook in self._hooks:
            hook.remove()

    def arrived(self, name: str) -> None:
        """A parameter has got its gradient."""
        if not self._is_waiting:
            # A micro-batch was taken back in which the hooks had gone, and with everything else they came back.
            self.close()
            return
        if not self._found:
            queue_callback(self._tell)
        self._found.append(name)

    def _tell(self) -> None:
        """The backward pass is over."""
        if not self._is_waiting:
            return
        self.end()
        warnings.warn(
            f"lowtide: gradients arrived at {self._where()}, and {self._why()}, so nothing is planned or moved.",
            stacklevel=2,
        )

    def _where(self) -> str:
        modules = dict(self._model.named_modules())
        names = list(dict.fromkeys(_runs(modules, name) for name in self._found))
        if names == [""]:
            return f"this {type(self._model).__name__}"
        shown = " and ".join(f"'{name}' ({type(modules[name]).__name__})" for name in names[:_MAX_NAMES])
        return shown + (f" and {len(names) - _MAX_NAMES} more modules" if len(names) > _MAX_NAMES else "")

    def _why(self) -> str:
        kind = type(self._model).__name__
        now = vars(self._model).get("forward")
        if self.was_aside:
            return (
                f"the forward of {kind} ran only where lowtide steps aside (without gradients, or inside a checkpoint "
                "region around it); checkpoint parts of the model instead, or leave that to lowtide"
            )
        if not isinstance(now, ForwardPatch):
            by = f"{getattr(now, '__module__', '?')}.{getattr(now, '__qualname__', type(now).__qualname__)}"
            return (
                f"the forward of {kind} that {self._call} wrapped was replaced afterwards (by {by}) and not called; "
                f"call {self._call} after that"
            )
        return (
            f"the forward of {kind}, which {self._call} wrapped, was never called; give {self._call} the module whose "
            "forward runs"
        )


def _hook(unseen: weakref.ref[UnobservedForwards], name: str) -> Callable[[Any], None]:
    def arrived(gradient: Any) -> None:
        found = unseen()
        if found is not None:
            found.arrived(name)

    return arrived


def _runs(modules: dict[str, nn.Module], parameter: str) -> str:
    """The outermost module below the model around a parameter that has a forward: it, or one inside it, has run."""
    parts = parameter.split(".")[:-1]
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        if type(modules[name]).forward is not nn.Module.forward:
            return name
    return ""
