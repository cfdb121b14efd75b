"""The gradients of a rank during one step: added up raw, apart for each stage, and divided once, at the end.

What: at its beginning a step sets the gradients that are there aside. Weights that several stages of the rank share
(tied embeddings, on rank 0 of a V) get one sum for each stage: `of_stage` puts the sum of a stage in place while its
backward runs. At the end the sums of the stages are added, divided, and added to what was set aside.
Why apart: the stages of a V take turns, in an order that differs from that of one process, and so would the rounding.
Cost: for a shared weight one more gradient for each stage; for gradients that are kept from step to step (not set to
None) one more of each during the step.
Not covered: hooks that use a gradient up as soon as it is added (optimizers that step inside the backward), for it is
not yet divided then; weights that stages on different ranks share.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn


class StepGradients:
    """Of one step. Ends in `give` or in `take_back`."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        parameters = {stage: list(module.parameters()) for stage, module in sorted(stages.items())}
        uses = Counter(parameter for own in parameters.values() for parameter in own)
        self._shared = {stage: [p for p in own if uses[p] > 1] for stage, own in parameters.items()}
        self._sums: dict[int, dict[nn.Parameter, torch.Tensor | None]] = {stage: {} for stage in parameters}
        """Of the shared ones, by stage."""
        self._before = {parameter: parameter.grad for parameter in uses}
        for parameter in uses:
            parameter.grad = None

    @contextlib.contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Inside, what a shared weight has as its gradient is the sum of this stage."""
        shared, sums = self._shared[stage], self._sums[stage]
        for parameter in shared:
            parameter.grad = sums.pop(parameter, None)
        try:
            yield
        finally:
            for parameter in shared:
                sums[parameter] = parameter.grad
                parameter.grad = None

    def give(self, divide_by: float) -> None:
        """Make the sums the gradients of the weights."""
        for sums in self._sums.values():
            for parameter, gradient in sums.items():
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._sums.clear()
        for parameter, before in self._before.items():
            if parameter.grad is None:
                parameter.grad = before
                continue
            if divide_by != 1:
                parameter.grad.div_(divide_by)
            if before is not None:
                parameter.grad = before.add_(parameter.grad)

    def take_back(self) -> None:
        """After a step that failed: the gradients are those from before it."""
        for parameter, before in self._before.items():
            parameter.grad = before
