"""What other optimizers would need: state, the peak with everything kept, and the floor, by kind of optimizer.

Why: the state is often the largest part, and which optimizer it will be is decided before the first step.
The state stays through the whole step, so that another one moves every peak by the difference: no plan is made anew.
Cost: some arithmetic. Not covered: temporaries of other optimizers' steps; state that a plan keeps elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.core.decisions import Prediction
from lowtide.core.profile import StateBytes
from lowtide.core.text_table import align
from lowtide.planner.optimizer_kinds import NOT_OF_SHARDS, Weight, state_by_kind
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerForecast:
    """One kind of optimizer. Bytes."""

    name: str
    state_bytes: int
    plain_peak_bytes: int
    floor_bytes: int


def optimizer_forecast(
    predicted: Prediction, state: StateBytes, weights: Sequence[Weight]
) -> tuple[OptimizerForecast, ...]:
    """For a step whose optimizer has `state.optimizer` bytes on the device throughout."""
    return tuple(
        OptimizerForecast(
            name=name,
            state_bytes=nbytes,
            plain_peak_bytes=predicted.plain_peak_bytes - state.optimizer + nbytes,
            floor_bytes=predicted.floor_bytes - state.optimizer + nbytes,
        )
        for name, nbytes in state_by_kind(weights).items()
    )


def forecast_lines(forecast: Sequence[OptimizerForecast], state: StateBytes, width: int | None = None) -> list[str]:
    """A head, one line for each kind, those that are left out for parameters in shards, and the gradients."""
    cells: list[tuple[str, ...]] = [("optimizer", "its state", "everything kept", "floor")]
    for kind in forecast:
        sizes = (kind.state_bytes, kind.plain_peak_bytes, kind.floor_bytes)
        cells.append((kind.name, *map(format_bytes, sizes)))
    gradients = f"gradients: {format_bytes(state.gradients)} when backward is over; none are there before it begins"
    unknown = [name for name in NOT_OF_SHARDS if name not in [kind.name for kind in forecast]]
    left_out = [f"not counted for parameters in shards: {', '.join(unknown)}"] if unknown else []
    table = align(cells, numeric=(1, 2, 3), width=width)
    return ["what other optimizers would need", *table, *left_out, gradients]
