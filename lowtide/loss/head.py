"""The head and the loss together, in blocks of a declared number of rows, so that logits never exist whole.

Why: the last things in a step that grow with tokens times words are the logits and their gradient. Llama-3-8B has 250
KiB of each for a token in bf16: 31 GiB of either at 131,072 tokens. Here one block of logits exists at a time.

Which sum: a sliced loss (cross_entropy.py) leaves the head whole, because the gradient of its weight is a sum over
rows, and a sum that is taken in parts rounds in another way. Here that sum is taken in parts, so it is declared:
- rows 0 to R-1 are the first block, R to 2R-1 the second, and so on; the last one has what is left;
- logits and the gradient of the hidden states are made block by block, by the matmul that the head would call;
- each block has its product for the weight (and its sum for the bias) in the dtype in which the head computes. They are
  added up in order, in fp32 or wider, and rounded once, to the dtype of the weight;
- the loss itself is one sum over all rows, as in the sliced loss.
The bits depend on R and on the batch, on nothing else: no budget, plan, tier or engine is asked (contract 20). With one
block they are plain PyTorch's.

How: by the blocks of blocks.py, each of which is a sliced loss. Its backward writes the gradient over the logits. What
is compared is the log-probability of each row's word, which depends on all its logits.

Cost: the head's matmul once more, 4 for 3; one wait for the device. Memory: one block of logits, the slices of the row
by row part, and of the weight's gradient an fp32 sum and one block's product beside it.
Not covered, and refused by name: a head that is no plain `torch.nn.Linear`, sharded weights, logits spread over ranks,
weights of classes, label smoothing, z-loss, second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import ConfigError
from lowtide.loss.blocks import RowWise
from lowtide.loss.cross_entropy import loss_of_rows, name_of, picked_of, words_of
from lowtide.tensors.wrappers import is_distributed

Step = tuple[str, torch.Tensor | None]
"""What a model does to its logits between head and loss: the name of the node in autograd's graph, and its number."""
TANH = "TanhBackward0"
FORWARD: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "DivBackward0": torch.div,
    "MulBackward0": torch.mul,
    TANH: lambda logits, _: logits.tanh(),
}
"""By the name of a node, what it does."""


def head_cross_entropy(
    hidden: torch.Tensor,
    head: nn.Linear,
    target: torch.Tensor,
    *,
    rows: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    upcast: bool = False,
    steps: tuple[Step, ...] = (),
    slice_rows: int | None = None,
) -> torch.Tensor:
    """`sliced_cross_entropy(head(hidden), target, ...)`, in blocks of `rows`.

    hidden: `[rows, width]`, floating point. target: `[rows]`, int64. `steps`: see `Step`, done to each block of logits.
    `slice_rows`: of the part that works row by row, absent: chosen; it changes no bit. Raises `ConfigError` for what is
    not covered.
    """
    if not torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != head.weight.dtype:
        raise ConfigError(
            f"lowtide.cross_entropy: hidden states are {name_of(hidden.dtype)} and the head's weight is "
            f"{name_of(head.weight.dtype)}; cast one of them, or use autocast"
        )
    words, is_ignored = words_of(target, ignore_index, len(head.weight))
    is_ours = not steps or steps[-1][0] != TANH  # which keeps what it gives for its own derivative

    def run(part: slice, inputs: list[Any], leaves: list[Any]) -> tuple[torch.Tensor]:
        logits = F.linear(inputs[0], *leaves)
        for name, number in steps:
            logits = FORWARD[name](logits, number)
        return (picked_of(logits, words[part], upcast=upcast, slice_rows=slice_rows, is_block=is_ours),)

    weights = [head.weight] if head.bias is None else [head.weight, head.bias]
    (picked,) = RowWise(run, rows, 1, "the head", "write loss: sliced (memory.loss)")(hidden, *weights)
    return loss_of_rows(picked, is_ignored, reduction)


def why_not_in_blocks(head: Any) -> str:
    """Why this head cannot be taken in blocks; empty where it can."""
    if type(head) is not nn.Linear:
        return f"the head is {type(head).__name__}, not a plain torch.nn.Linear"
    if "forward" in vars(head):
        return "somebody has replaced the forward of its head"
    if any(is_distributed(parameter) for parameter in head.parameters()):
        return "the head's weight is spread over ranks"
    return ""
