"""The norm of all gradients of a pipeline, as one process computes it.

What: each rank takes the norm of each of its weights; all ranks put them together in the order of the stages and of
their weights, and take the norm of these. That is what `torch.nn.utils.get_total_norm` does with the parameters of the
whole model, so the bits are the same, and so are those of a step that clips by it. A shared weight counts once, at its
first place.
Of a weight that FSDP2 shards, the norm is that of all its shards.
Cost: one small collective. Not covered: the other norms of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from lowtide.tensors.fsdp import whole_of
from lowtide.tensors.ranks import gather

_Norms = dict[int, list[tuple[torch.dtype, float]]]
"""Of the weights of each stage, with the dtype of their gradients."""


def gradient_norm(
    weights: Mapping[int, Sequence[torch.Tensor]], elsewhere: Collection[torch.Tensor], group: Any
) -> torch.Tensor:
    """Collective. weights: of each stage of the rank. elsewhere: those that another place counts."""
    seen = set(elsewhere)
    own: _Norms = {}
    for stage, each in sorted(weights.items()):
        own[stage] = []
        for weight in each:
            if weight.grad is not None and weight not in seen:
                norm = whole_of(torch.nn.utils.get_total_norm([weight.grad]))
                own[stage].append((norm.dtype, float(norm)))
            seen.add(weight)
    stages = {stage: norms for rank in gather(own, group) for stage, norms in rank.items()}
    norms = [torch.tensor(norm, dtype=dtype) for _, every in sorted(stages.items()) for dtype, norm in every]
    device = next((weight.device for each in weights.values() for weight in each), torch.device("cpu"))
    return torch.nn.utils.get_total_norm(norms).to(device)
