"""The gradients of a rank during one step: added up raw, apart for each stage, and divided once, at the end.

What: at its beginning a step sets the gradients that are there aside. Weights that several stages have (tied
embeddings) get one sum for each stage: `of_stage` puts the sum of a stage in place while its backward runs. At the end
the sums of the stages are added in the order of the stages, those of other ranks among them (tied.py), divided, and
added to what was set aside.
Why apart: the stages of a V take turns, in an order that differs from that of one process, and so would the rounding.
Cost: for a shared weight one more gradient for each stage; for gradients that are kept from step to step (not set to
None) one more of each during the step.
Not covered: hooks that use a gradient up as soon as it is added (optimizers that step inside the backward), for it is
not yet divided then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from lowtide.errors import ConfigError


class StepGradients:
    """Of one step. Ends in `give` or in `take_back`."""

    def __init__(self, weights: Mapping[int, Iterable[torch.Tensor]], *, shared: Collection[torch.Tensor] = ()) -> None:
        """weights: what each stage of the rank trains, by its number. shared: those that stages of other ranks have
        too."""
        self._stages: dict[torch.Tensor, list[int]] = {}
        """That each weight belongs to."""
        self._sums: dict[torch.Tensor, dict[int, torch.Tensor | None]] = {weight: {} for weight in shared}
        """Of the shared ones, by stage."""
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}
        self._running: set[int] = set()
        """Stages whose backward is under way."""
        for stage, own in sorted(weights.items()):
            for weight in own:
                self.include(stage, weight)

    def include(self, stage: int, weight: torch.Tensor) -> None:
        """From now on it belongs to this stage too: no backward of this step has given it a gradient from there yet."""
        stages = self._stages.setdefault(weight, [])
        if stage in stages:
            return
        if not stages:
            self._before[weight] = weight.grad
            weight.grad = None
        elif weight not in self._sums:
            if self._running:
                raise ConfigError(
                    f"pipeline: a weight of shape {list(weight.shape)} is shared by the stages {stages[0]} and "
                    f"{stage}, and was first used by the second one after backwards had begun; use it in each "
                    "micro-batch"
                )
            self._sums[weight] = {stages[0]: weight.grad}
            weight.grad = None
        stages.append(stage)

    @contextlib.contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Inside, what a shared weight has as its gradient is the sum of this stage."""
        shared = [(weight, sums) for weight, sums in self._sums.items() if stage in self._stages.get(weight, ())]
        for weight, sums in shared:
            weight.grad = sums.pop(stage, None)
        self._running.add(stage)
        try:
            yield
        finally:
            self._running.discard(stage)
            for weight, sums in shared:
                sums[stage] = weight.grad
                weight.grad = None

    def sum_of(self, stage: int, weight: torch.Tensor) -> torch.Tensor | None:
        """Of a shared weight, what this stage has added up."""
        return self._sums[weight].get(stage)

    def add_remote(self, stage: int, weight: torch.Tensor, given: torch.Tensor | None) -> None:
        """What a stage of another rank has added up for this shared weight."""
        self._sums[weight][stage] = given

    def give(self, divide_by: float) -> None:
        """Make the sums the gradients of the weights."""
        for weight, sums in self._sums.items():
            for _, gradient in sorted(sums.items()):
                if gradient is not None:
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self._sums.clear()
        for weight, before in self._before.items():
            if weight.grad is None:
                weight.grad = before
                continue
            if divide_by != 1:
                weight.grad.div_(divide_by)
            if before is not None:
                weight.grad = before.add_(weight.grad)

    def take_back(self) -> None:
        """After a step that failed: the gradients are those from before it."""
        for weight, before in self._before.items():
            weight.grad = before
