"""What a plan says of single activations, and what it promises: the rows of a plan.

Frozen data, below `plan.py` and below the table that prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.core.fate import Fate, Tier
from lowtide.core.recipe import Anchor, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDecision:
    """The fate of one activation storage of one micro-batch."""

    name: str
    """`model.layers.3.mlp.mul`."""
    layer: str | None
    """`model.layers.3`, or None for what lies outside the layers."""
    nbytes: int
    dtype: str
    """`bfloat16`."""
    fate: Fate
    tier: Tier | None = None
    """Swap only: the tier the bytes go to; None is the fastest that the engine has."""
    prefetch: int | None = None
    """Swap only: operators of the backward pass between the start of the fetch and the first reader; None: by bytes."""
    leave: int | None = None
    """Swap only: forward operators (autograd's sequence numbers) after its first save by which its copy must be
    complete, else compute waits; None: whenever the window of bytes on their way out asks for it."""
    anchor: Anchor | None = None
    """Where module hooks catch it; None for what autograd saves."""
    recipe: Recipe | None = None
    """Recompute only: the operators that compute it again. None where a whole layer or module runs again."""
    cost_seconds: float = 0.0
    """Predicted time that this fate adds to the step: recompute time; for a swap its share of compute lost."""
    reason: str
    """One short phrase: the rule and where it was written, or what spoke against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a solved plan will cost. One step of one micro-batch."""

    peak_bytes: int
    """Everything on the device at the worst moment of forward and backward."""
    step_seconds: float
    stall_seconds: float
    recompute_seconds: float
    gap: float
    """No schedule of the same model can be faster than `step_seconds` by more than this share of it."""
    plain_peak_bytes: int
    """With everything kept."""
    plain_seconds: float
    floor_bytes: int
    """The smallest peak that the solver can reach."""
    forward_peak_bytes: int = 0
    """Everything on the device at the worst moment of forward alone."""
    forward_held_bytes: int = 0
    """The same without what lives for a few operators: state, the batch, and activations held for backward."""
    check_seconds: float = 0.0
    """What proving recipes adds to the step, beyond `step_seconds`."""
    certainty: str
    """Where bytes and times come from: 'observed on cpu', 'traced without a device, times by roofline of h200'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLine:
    """One line of the account: what is on the device at the worst moment, without and with the plan."""

    what: str
    """'weights', 'gradients', 'optimizer state', 'activations', 'outside layers', 'temporaries'."""
    plain_bytes: int
    planned_bytes: int
