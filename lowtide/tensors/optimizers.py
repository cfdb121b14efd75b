"""The user's optimizer: read, never written through.

What: trainers wrap optimizers (Accelerate's `AcceleratedOptimizer`, which Hugging Face's `Trainer` gives to its
callbacks, Lightning's `LightningOptimizer`, mixed-precision wrappers), and a wrapper's attributes may be properties
that write to the optimizer inside. `bare` finds the one inside, `optimizer_of` refuses what is none at all.

Why so: what is shared with the original may be read, never assigned to; see profiling/state_bytes.py for its copy.
Cost: a few attribute reads. Not covered: wrappers with parameters or state of their own; those count as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import ConfigError
from lowtide.tensors.wrappers import is_distributed

SWAP_ATTRIBUTE = "lowtide_swap"
"""Attribute of an optimizer that gives the handle of its swapped state."""
CUT_ELEMENTS = 65_536
"""A large parameter is stepped in stretches of so many elements or a multiple: whole vectors, and where torch's foreach
and fused kernels on accelerators cut it themselves."""
ELEMENTWISE = frozenset(
    {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    }
)
"""Classes of torch that update each element of a parameter by that element alone. Not Adafactor and Muon."""
_WIDE_BYTES = 4
_FUSED_ALIKE = frozenset({"Adagrad", "Adam", "AdamW"})
_INSIDE = ("optimizer", "_optimizer")
_MAX_WRAPPERS = 8


def optimizer_of(optimizer: Any, call: str) -> Any:
    """The optimizer inside any wrappers; None for None. Raises ConfigError for what has no parameters and no state."""
    if optimizer is None:
        return None
    found = bare(optimizer)
    if not _is_optimizer(found):
        raise ConfigError(
            f"{call}: optimizer= takes a torch.optim.Optimizer, or a wrapper around one, not {type(optimizer).__name__}"
        )
    return found


def bare(optimizer: Any) -> Any:
    """The optimizer that others wrap: the innermost one with the same parameters and the same state."""
    for _ in range(_MAX_WRAPPERS):
        held = getattr(optimizer, "__dict__", {})
        inner = next((held[key] for key in _INSIDE if key in held and _is_optimizer(held[key])), None)
        if inner is None or not _is_same(optimizer, inner):
            break
        optimizer = inner
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def bare_step(kind: type) -> Callable[..., Any]:
    """A class's own `step`, without the hooks that torch puts around it."""
    step: Any = kind.step  # type: ignore[attr-defined]
    return inspect.unwrap(step, stop=lambda function: not hasattr(function, "hooked"))


def is_alike_in_stretches(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, *, is_accelerator: bool
) -> bool:
    """Whether a parameter of this group gets the same bits where stretches of its elements are stepped one by one.

    Of a distributed one a stretch is a plain tensor, and torch chooses by the class of a tensor where neither `foreach`
    nor `fused` was chosen. torch's kernels for main memory round the last elements of each thread's share of a tensor
    in half precision in another way than the others. Not so on one thread, nor in the fused kernels of `_FUSED_ALIKE`.
    """
    kind, dtype = type(optimizer), parameter.dtype
    if not (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE) or dtype.is_complex:
        return False
    if is_distributed(parameter) and group.get("foreach") is None and not group.get("fused"):
        return False
    if is_accelerator or dtype.itemsize >= _WIDE_BYTES:
        return True
    return kind.__name__ in _FUSED_ALIKE if group.get("fused") else torch.get_num_threads() == 1


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, torch.optim.Optimizer) or (
        isinstance(getattr(found, "param_groups", None), list) and hasattr(getattr(found, "state", None), "values")
    )


def _is_same(outer: Any, inner: Any) -> bool:
    """Whether a wrapper shows the parameters and the state of what it wraps, and none of its own."""
    if not hasattr(outer, "param_groups") or not hasattr(outer, "state"):
        return True
    groups, inside = outer.param_groups, inner.param_groups
    same_groups = len(groups) == len(inside) and all(one is other for one, other in zip(groups, inside, strict=True))
    return same_groups and (outer.state is inner.state or not isinstance(outer, torch.optim.Optimizer))
