"""The MLPs of a model in blocks of a declared number of rows, so that nothing as wide as an MLP exists for all rows.

Why: once logits are gone (head.py), the backward pass of a layer's MLP sets the floor of long sequences. In Llama-3-8B
some nine tensors of 28 KiB a token are alive there; here they are for one block of rows.

How, and which sum: blocks.py. A batch of one block goes through the model's own forward, and has plain's bits.
Cost: the MLP's forward once more, three matmuls of nine; a wait for the device for each MLP. Where the layer runs again
too, the MLP runs three times. Memory: a block's activations, and for each weight of one MLP an fp32 sum.
Which MLPs: those of transformers' dense families that are `down_proj(act_fn(gate_proj(x)) * up_proj(x))`. That a module
is one is found out by comparing both on a few rows, to the bit. Not covered, and refused by name: other MLPs, adapters
on them, hooks on their parts, weights that are spread over ranks, second derivatives.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import ConfigError
from lowtide.loss.blocks import RowWise
from lowtide.loss.head import why_not_in_blocks
from lowtide.tensors.private import has_forward_hooks
from lowtide.tensors.wrappers import is_distributed

_LINEAR = ("gate_proj", "up_proj", "down_proj")
_PARTS = (*_LINEAR, "act_fn")
_NUM_PROBED = 4
_WHAT, _FIX = "an MLP in blocks", "leave memory.mlp out"


class MlpsInBlocks:
    """The MLPs of a model in blocks of `rows`, until `remove()`. Raises `ConfigError` where there is none to take."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.rows = rows
        found = {name: mlp for name, mlp in model.named_modules() if all(hasattr(mlp, part) for part in _PARTS)}
        if not found:
            raise ConfigError(
                f"memory.mlp: {type(model).__name__} has no MLP with {', '.join(_PARTS)}, which can be taken in blocks "
                "of rows; leave memory.mlp out"
            )
        for name, mlp in found.items():
            if reason := _why_not(mlp):
                raise ConfigError(
                    f"memory.mlp: '{name}' cannot be taken in blocks of rows: {reason}; leave memory.mlp out"
                )
        self.mlps: list[Any] = list(found.values())
        for mlp in self.mlps:
            mlp.forward = _InBlocks(mlp, rows)

    def remove(self) -> None:
        """The model's own forward again, where nobody has set another since."""
        for mlp in self.mlps:
            if isinstance(vars(mlp).get("forward"), _InBlocks):
                del mlp.forward


def mlp_rows_of(model: nn.Module) -> int | None:
    """The rows of a block of an MLP, where they are in force."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((forward.rows for forward in forwards if isinstance(forward, _InBlocks)), None)


def _why_not(mlp: Any) -> str:
    if "forward" in vars(mlp):
        return "somebody has replaced its forward"
    for name in _LINEAR:
        part = getattr(mlp, name)
        if reason := why_not_in_blocks(part):
            return reason.replace("the head", name)
    if any(has_forward_hooks(getattr(mlp, part)) for part in _PARTS):
        return "there are hooks on its parts, which would not run"
    weight = mlp.gate_proj.weight
    if weight.is_meta:
        return ""  # no values to compare
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_NUM_PROBED, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        is_same = torch.equal(type(mlp).forward(mlp, probe), _run(mlp.act_fn, probe, _weights(mlp)))
    return "" if is_same else "it computes something else than down_proj(act_fn(gate_proj(x)) * up_proj(x))"


class _InBlocks:
    """The forward of one MLP."""

    def __init__(self, mlp: Any, rows: int) -> None:
        self.rows = rows
        self._mlp = mlp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_one_block = math.prod(x.shape[:-1]) <= self.rows
        if is_one_block or not torch.is_grad_enabled() or is_distributed(x) or torch.compiler.is_compiling():
            made: torch.Tensor = type(self._mlp).forward(self._mlp, x)
            return made
        flat = x.reshape(-1, x.shape[-1])
        act = self._mlp.act_fn
        (out,) = RowWise(lambda _, block, weights: (_run(act, block[0], weights),), self.rows, 1, _WHAT, _FIX)(
            flat, *_weights(self._mlp)
        )
        return out.view(*x.shape[:-1], out.shape[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or a file of it, has its own forward: nobody would ever take a copied one off."""
        return _own_forward, (self._mlp,)


def _own_forward(mlp: Any) -> Any:
    return types.MethodType(type(mlp).forward, mlp)


def _weights(mlp: Any) -> list[torch.Tensor | None]:
    return [each for name in _LINEAR for each in (getattr(mlp, name).weight, getattr(mlp, name).bias)]


def _run(act: Any, x: torch.Tensor, weights: list[Any]) -> torch.Tensor:
    gate, gate_bias, up, up_bias, down, down_bias = weights
    wide = type(act).forward(act, F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
    return F.linear(wide, down, down_bias)
