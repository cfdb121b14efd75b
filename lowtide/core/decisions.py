"""The rows of a plan: the fate of each activation, where the optimizer's state is, and the predicted peak and time.

Frozen data, below `plan.py` and below the table that prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lowtide.core.fate import Fate, Tier
from lowtide.core.json_text import OLD_NAME
from lowtide.core.profile import Site, StayingBytes
from lowtide.core.recipe import Codec, Recipe, RetainedInput
from lowtide.units import format_bytes, format_seconds

Overlap = Literal["step", "backward", "in_backward"]
"""When the state of an optimizer travels. step: while the optimizer steps. backward: as much as memory allows while the
last backward pass runs, and back while the next forward pass runs. in_backward: updates too are done in backward."""


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
    retained_input: RetainedInput | None = field(default=None, metadata={OLD_NAME: "anchor"})
    """Where module hooks catch it; None for what autograd saves."""
    recipe: Recipe | None = None
    """Recompute only: the operators that compute it again. None where a whole layer or module runs again."""
    codec: Codec | None = None
    """Keep and swap only: the smaller form in which it is kept or swapped. None: as it is."""
    cost_seconds: float = 0.0
    """Predicted time that this fate, or this codec, adds to the step: recompute time; for a swap its share of compute
    lost."""
    reason: str
    """One short phrase: the rule and where it was written, or what spoke against it."""

    @classmethod
    def of(cls, node: Site | StayingBytes, fate: Fate, reason: str, **more: Any) -> SiteDecision:
        """Of an activation of a profile."""
        own: Any = {"name": node.name, "layer": node.layer, "nbytes": node.nbytes, "dtype": node.dtype}
        return cls(**own, fate=fate, reason=reason, **more)

    @property
    def stored_bytes(self) -> int:
        """What is kept or swapped: the smaller form, if it has one."""
        return self.nbytes if self.codec is None else self.codec.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlacement:
    """Where an optimizer's state is between its steps, and when it travels. Seconds are of one step of it."""

    moved_bytes: int | None
    """State that is on `tier` between steps; 0: all of it stays. None: all that can move, not counted yet."""
    resident_bytes: int = 0
    """State that could move and stays on the device: whole buckets."""
    tier: Tier = Tier.HOST
    bucket_bytes: int | None = None
    """What is copied at once; None: chosen when the state is seen."""
    num_slots: int = 3
    """Places for buckets that come and go while the optimizer steps."""
    overlap: Overlap | None = None
    """None: chosen when the state is seen."""
    beside_bytes: int = 0
    """The part of `moved_bytes` that travels beside compute: it comes while the last backward pass frees memory for it,
    and leaves while the next forward pass runs. The rest comes and goes while the optimizer steps, through slots."""
    exposed_seconds: float = 0.0
    """Compute waits for it."""
    slowed_seconds: float = 0.0
    """Compute takes that much longer beside its copies."""
    free_from_tokens: int | None = None
    """Tokens of a step from which on nothing is exposed; None: there is no such number, or it is not known."""
    reason: str
    """One short phrase."""

    @property
    def moves(self) -> bool:
        """Whether any of it travels."""
        return self.moved_bytes != 0

    def lines(self) -> list[str]:
        """Where the optimizer's state is between steps, when it travels, and what that costs."""
        if not self.moves:
            return [f"optimizer state: stays on the device, {self.reason}"]
        if self.moved_bytes is None:
            return [f"optimizer state: on the {self.tier.value} between steps, {self.reason}"]
        stays = f", {format_bytes(self.resident_bytes)} stays" if self.resident_bytes else ""
        lines = [
            f"optimizer state: {format_bytes(self.moved_bytes)} on the {self.tier.value} between steps{stays}; "
            f"{self.reason}"
        ]
        ways = []
        if self.overlap == "in_backward":
            ways.append("it comes and leaves while backward runs, where its parameters are updated")
        elif self.beside_bytes:
            ways.append(f"{format_bytes(self.beside_bytes)} come back while backward runs, leave in the next forward")
        streamed_bytes = self.moved_bytes - self.beside_bytes
        if streamed_bytes and self.overlap != "in_backward":
            ways.append(f"{format_bytes(streamed_bytes)} come and go while the optimizer steps")
        bucket = "" if self.bucket_bytes is None else f", in buckets of {format_bytes(self.bucket_bytes)}"
        lines.append(f"  {'; '.join(ways)}{bucket}")
        free = "" if self.free_from_tokens is None else f"; free from {self.free_from_tokens:,} tokens a step"
        lines.append(
            f"  exposed {format_seconds(self.exposed_seconds)} a step, slows compute by "
            f"{format_seconds(self.slowed_seconds)}{free}"
        )
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlacement:
    """Where the weights of layers are between their turns. Bytes and seconds are of one step."""

    moved_bytes: int
    """Weights that are on `tier` but for their layer's turn; 0: all of them stay."""
    resident_bytes: int = 0
    """Weights of layers that could move and stay on the device."""
    layers: tuple[str, ...] = ()
    """Whose weights move."""
    tier: Tier = Tier.HOST
    window_bytes: int = 0
    """Of them, on the device at a time."""
    in_bytes: int = 0
    """What the link brings of weights and optimizer state."""
    out_bytes: int = 0
    """What it takes of them."""
    host_bytes: int = 0
    """All that is on `tier` at once: weights, optimizer state, activations."""
    exposed_seconds: float = 0.0
    """Compute waits for weights."""
    hidden_from_tokens: int | None = None
    """N*: tokens of a step from which on the link has time for weights and optimizer state beside compute."""
    reason: str
    """One short phrase."""

    def lines(self) -> list[str]:
        """Where the weights of layers are, and what that costs."""
        if not self.moved_bytes:
            return [f"weights: stay on the device, {self.reason}"]
        stays = f", {format_bytes(self.resident_bytes)} of other layers stay" if self.resident_bytes else ""
        hidden = "" if self.hidden_from_tokens is None else f"; N* = {self.hidden_from_tokens:,} tokens a step"
        return [
            f"weights: {format_bytes(self.moved_bytes)} of {len(self.layers)} layers on the {self.tier.value} until "
            f"their turn{stays}; {self.reason}",
            f"  {format_bytes(self.window_bytes)} of them are on the device at a time; {self.tier.value}: "
            f"{format_bytes(self.host_bytes)} in all",
            f"  with optimizer state {format_bytes(self.in_bytes)} come and {format_bytes(self.out_bytes)} go in a "
            f"step; compute waits {format_seconds(self.exposed_seconds)} for weights{hidden}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a solved plan will cost. One step of one micro-batch."""

    peak_bytes: int
    """Everything on the device at the worst moment of forward and backward."""
    step_seconds: float
    """Forward and backward, with this micro-batch's share of what the optimizer's state costs on its way."""
    stall_seconds: float
    recompute_seconds: float
    """Time of recipes and of layers that run again, without codecs."""
    gap: float
    """No schedule of the same model can be faster than `step_seconds` by more than this share of it."""
    plain_peak_bytes: int
    """Peak of the same step with everything kept."""
    plain_seconds: float
    floor_bytes: int | None
    """The smallest peak that the solver can reach; None: it was not asked for."""
    forward_peak_bytes: int = 0
    """Everything on the device at the worst moment of forward alone."""
    forward_held_bytes: int = 0
    """The same without what lives for a few operators: state, the batch, and activations held for backward."""
    check_seconds: float = 0.0
    """What proving recipes adds to the step, beyond `step_seconds`."""
    codec_seconds: float = 0.0
    """The part of `step_seconds` in which storages are encoded and decoded."""
    optimizer_seconds: float = 0.0
    """The part of `step_seconds` that the optimizer's state costs on its way."""
    page_fault_seconds: float = field(default=0.0, metadata={OLD_NAME: "touch_seconds"})
    """The part of `step_seconds` in which memory that went back to the system is taken again, page by page."""
    limit_bytes: int | None = None
    """What copies were timed for: the budget, or less where that is as good. None: the budget."""
    swap_excess_seconds: float = 0.0
    """No activation is swapped, since the best plan that does is slower by this much: memory that went back to the
    system is taken again. 0: that is not why."""
    certainty: str
    """Where bytes and times come from: 'observed on cpu', 'traced without a device, times by roofline of h200'."""

    @property
    def pass_seconds(self) -> float:
        """Forward and backward alone, recipes proven."""
        return self.step_seconds + self.check_seconds - self.optimizer_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLine:
    """One line of the account: what is on the device at the worst moment, without and with the plan."""

    what: str
    """'weights', 'gradients', 'optimizer state', 'activations', 'outside layers', 'temporaries'."""
    plain_bytes: int
    planned_bytes: int
