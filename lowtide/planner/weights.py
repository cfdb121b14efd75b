"""What a step costs whose weights come for their layer's turn: `lowtide plan --weights`, and the curve over tokens.

What: `streamed` prices a step in which the weights, gradients and optimizer state of all layers are elsewhere
(`swap_weights` with `update="in_backward"`), beside a plan for activations within the same budget. The solver's items
are born once and read in backward; weights exist before, are read twice and leave changed. So this is beside it.

How: the state on the device is a window of `NUM_LAYERS_HERE` layers, the gradients in flight, and three buckets. The
solver plans activations for that, over a link that has what weights leave of it in backward; the share is found by
turns, since a slower step leaves more. `play` then puts both on one clock, layer by layer.

    N* = computation a second / bytes a second * bytes that must come a parameter / 6 or 8 FLOP: from so many tokens a
    step on the link is hidden, whatever the size of the model

Cost: at most `_NUM_TURNS` plans. Not covered: many micro-batches for one stay of a layer, disks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import BudgetError
from lowtide.planner.place_state import NUM_SLOTS, bucket_size, bucket_temporaries
from lowtide.planner.plan_profile import plan_profile
from lowtide.timeline.step import Link

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

NUM_LAYERS_HERE = 3
"""One that computes, one that arrives, one that leaves."""
_NUM_TURNS = 4
_LEAST_SHARE = 0.02
"""Of the link, that is left to activations where weights would fill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A step with weights elsewhere. Predicted."""

    plan: Plan
    """For activations, in the memory that is left."""
    step_seconds: float
    stall_seconds: float
    """Of it, what compute waits for the link."""
    plain_seconds: float
    """The same step on a device without a limit."""
    in_bytes: int
    out_bytes: int
    """Of weights and optimizer state, in one step."""
    host_bytes: int
    """All that is elsewhere at once, activations too."""
    hidden_from_tokens: int
    """N*: a step of so many tokens hides what must come, if it is as long for each token as this one."""


def streamed(
    profile: Profile, config: MemoryConfig, *, link: Link, budget_bytes: int, layer_bytes: int, tokens: int
) -> Streamed:
    """Price the step. `layer_bytes`: of the weights of all layers. Raises `BudgetError` where no plan fits."""
    num_layers, state = len(profile.layers), profile.state
    one = layer_bytes // num_layers
    share = layer_bytes / state.parameters
    moments = round(state.optimizer_movable * share)
    here = _with_a_window(profile, link, layer_bytes, one, moments)
    plain_seconds = sum(profile.op_seconds)
    forward_seconds = sum(profile.op_seconds[: profile.num_forward_ops])
    backward_seconds = plain_seconds - forward_seconds
    best: Streamed | None = None
    error: BudgetError | None = None
    for _ in range(_NUM_TURNS):
        rate = link.in_bytes_per_second - (layer_bytes + moments) / backward_seconds
        left = dataclasses.replace(link, in_bytes_per_second=max(rate, _LEAST_SHARE * link.in_bytes_per_second))
        try:
            plan = plan_profile(here, config, link=left, budget_bytes=budget_bytes, with_suggestions=False)
        except BudgetError as failed:
            error = failed
            break
        assert plan.predicted is not None
        swapped = sum(site.stored_bytes for site in plan.sites if site.fate is Fate.SWAP)
        recompute = max(plan.predicted.step_seconds - plan.predicted.stall_seconds - plain_seconds, 0.0)
        played, stall = play(
            num_layers,
            forward_seconds,
            plain_seconds - forward_seconds + recompute,
            weight_bytes=layer_bytes,
            moment_bytes=moments,
            activation_bytes=swapped,
            link=link,
        )
        in_bytes = 2 * layer_bytes + moments
        found = Streamed(
            plan=plan,
            step_seconds=played,
            stall_seconds=stall,
            plain_seconds=plain_seconds,
            in_bytes=in_bytes,
            out_bytes=layer_bytes + moments,
            host_bytes=layer_bytes + moments + swapped,
            hidden_from_tokens=round(tokens * in_bytes / link.in_bytes_per_second / (plain_seconds + recompute)),
        )
        if best is None or found.step_seconds < best.step_seconds:
            best = found
        if backward_seconds == played - forward_seconds:
            break
        backward_seconds = played - forward_seconds
    if best is None:
        assert error is not None
        raise error
    return best


def _with_a_window(profile: Profile, link: Link, layer_bytes: int, one: int, moments: int) -> Profile:
    """The same step, with a window of the layers' weights and optimizer state on the device."""
    state = profile.state
    bucket = bucket_size(state, link)
    ratio = (state.gradients or 0) / state.parameters
    in_flight = round(2 * one * ratio)
    made = tuple(min(each, in_flight) for each in profile.op_gradient_bytes)
    pairs = zip(profile.op_bytes, profile.op_gradient_bytes, made, strict=True)
    op_bytes = tuple(total - then + now for total, then, now in pairs)
    here = dataclasses.replace(
        state,
        parameters=state.parameters - layer_bytes + NUM_LAYERS_HERE * one,
        gradients=in_flight,
        optimizer=state.optimizer - moments + NUM_SLOTS * bucket,
        optimizer_movable=0,
        optimizer_unit=0,
        optimizer_temporaries=bucket_temporaries(state, bucket) if state.optimizer_movable else 0,
    )
    return dataclasses.replace(profile, op_bytes=op_bytes, op_gradient_bytes=made, state=here)


def play(
    num_layers: int,
    forward_seconds: float,
    backward_seconds: float,
    *,
    weight_bytes: int,
    moment_bytes: int,
    activation_bytes: int,
    link: Link,
) -> tuple[float, float]:
    """Seconds of a step, and of waiting in it: layers of equal length, two servers, one clock."""
    weights, moments, activations = (b / num_layers for b in (weight_bytes, moment_bytes, activation_bytes))
    now = came = left = stall = 0.0
    ends = [0.0] * (NUM_LAYERS_HERE - 1)  # of the layers before: their memory is free then
    for turn in range(2 * num_layers):
        is_backward = turn >= num_layers
        coming = weights + (moments + activations if is_backward else 0.0)
        leaving = weights + moments if is_backward else activations
        seconds = (backward_seconds if is_backward else forward_seconds) / num_layers
        if num_layers <= turn < num_layers + NUM_LAYERS_HERE - 1:  # the last layers of forward are still there
            coming -= weights + activations
        came = max(came, ends[-(NUM_LAYERS_HERE - 1)]) + link.latency_seconds + coming / link.in_bytes_per_second
        stall += (waits := max(came - now, left - now - NUM_LAYERS_HERE * seconds, 0.0))
        now += waits + seconds
        left = max(left, now) + link.latency_seconds + leaving / link.out_bytes_per_second
        ends.append(now)
    return max(now, left), stall + max(left - now, 0.0)
