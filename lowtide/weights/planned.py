"""`memory.weights` under a budget: weights, gradients, optimizer state and activations that follow one plan.

What: `PlacedWeights` stands where an autopilot has its optimizer's state (runtime/session/optimizer_state.py). The
weights leave before the first step is observed, so that this one too has only a window of them on the device. A plan
then says which layers' weights come and go, how many bytes of them are there at a time, and how optimizer state visits
in backward; what it leaves on the device comes back to stay.
Several plans, as an autopilot has: what stays is what all of them leave there. With less on the device than planned no
plan needs more memory.
Cost: the observed step fetches each layer twice, and hides little of it. Not covered: weights that come back to stay
where a later plan has room for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from lowtide.config.memory import MemoryConfig, plan_from_rules
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.plan import Plan
from lowtide.engines.base import Engine
from lowtide.errors import ConfigError
from lowtide.optimizer.buckets import LEAST_BYTES, MOST_BYTES
from lowtide.profiling.layers import MIN_BYTES, find_layers
from lowtide.runtime.session.optimizer_state import PlacedState, plan_of_place
from lowtide.weights.swap import WeightSwap, swap_weights


class PlacedWeights(PlacedState):
    """The weights of one model and the state of its optimizer under plans."""

    def __init__(self, model: nn.Module, config: MemoryConfig, optimizer: Any, engine: Engine, call: str) -> None:
        super().__init__(optimizer, engine, call)
        self._model = model
        self._config = config
        self.weights: WeightSwap | None = None
        """The handle; None before and after."""

    def check(self, placement: OptimizerPlacement | None) -> None:
        """Raises `ConfigError` for what cannot be swapped; else the weights are elsewhere from now on."""
        super().check(placement)
        assert placement is not None
        layers = find_layers(self._model) if self._config.layers is None else self._config.layers
        if not layers:
            raise ConfigError(
                f"memory.weights: no repeated block was found in {type(self._model).__name__}; name the layers with "
                "layers: [...]"
            )
        bare = plan_from_rules(dataclasses.replace(self._config, recompute=None, swap=None), layers)
        self._engine = self.beside.another(plan_of_place(bare, placement))
        try:
            how: Any = {"engine": self._engine, "bucket_bytes": LEAST_BYTES, "layers": layers}
            if self._config.min_bytes is not None:
                how["min_bytes"] = min(self._config.min_bytes, MIN_BYTES)
            self.weights = swap_weights(self._model, self.optimizer, update="in_backward", **how)
        except BaseException:
            self._engine.close()
            self._engine = None
            raise
        self.weights.is_planned = True
        self.handle = self.weights.optimizer_swap

    def settle(self) -> None:
        """No copy is under way from here on."""
        super().settle()
        if self.weights is not None:
            self.weights.flush()

    def follow(self, plan: Plan) -> None:
        """Have the weights and the state move that the plan says."""
        super().follow(plan)
        assert self.weights is not None and plan.weights is not None
        self.weights.move_only(plan.weights.layers, plan.weights.window_bytes)

    def _attach(self, plan: Plan, placement: OptimizerPlacement, share: float) -> None:
        assert self.weights is not None
        bucket_bytes = min(max(placement.bucket_bytes or 0, LEAST_BYTES), MOST_BYTES)
        how: Any = {"bucket_bytes": bucket_bytes, "num_buffers": max(placement.num_slots, 2)}
        self.weights.place_state(resident=share, **how)
        self.handle = self.weights.optimizer_swap

    def remove(self) -> None:
        """Bring weights and state back to the device. Idempotent."""
        if self.weights is not None:
            self.weights.remove()
            self.weights = self.handle = self.resident_bytes = None
        super().remove()
