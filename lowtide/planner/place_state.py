"""Which part of an optimizer's state is elsewhere between steps, for `memory.optimizer: swap | auto`.

What: `shares_allowed` cuts the state into shares that are solved together with the activations (state_items.py,
space.py: one budget, one link), and `placed` says what those of a plan cost on their way.

- swap: all of the state that can move does; the solver only decides which shares travel beside forward and backward and
  which while the optimizer steps.
- auto: a share may stay too. Where everything fits, it does; and a plan is never slower than the one that keeps it all.
- in_backward: all of it that can move travels in backward, and parameters are updated there (in_backward.py).

Why buckets: the step of the optimizer needs three of them and not all of the state, and its temporaries (4 bytes a
parameter for torch's `foreach`) are one bucket's. Sizes: 3 ms of the link, 64 to 256 MiB, since the host takes up to
0.2 ms to step one; at most an eighth of the state; at least what must be stepped at once (of a large parameter a
stretch, if the optimizer is elementwise, and all of it otherwise).
Cost: a play of each plan. Not covered: host memory slower than the link.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Fate, Tier
from lowtide.core.profile import Profile, StateBytes
from lowtide.errors import ConfigError
from lowtide.planner.space import WayPlan
from lowtide.planner.state_items import NAME, StateShares, split
from lowtide.timeline.step import Link
from lowtide.units import MIB, format_bytes

_BUCKET_SECONDS = 3e-3
_LEAST_BUCKET, _MOST_BUCKET = 64 * MIB, 256 * MIB
_LEAST_BUCKETS = 8
_MOST_SHARES = 64
NUM_SLOTS = 3
"""Places for buckets while the optimizer steps."""
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSeconds:
    """What of a played step is for the state on its way."""

    stall: float = 0.0
    slowed: float = 0.0
    streamed: float = 0.0
    """Recomputes that are none: shares that come and go while the optimizer steps."""
    num_micro_batches: int = 1

    @property
    def played(self) -> float:
        return self.stall + self.slowed + self.streamed

    @property
    def shared(self) -> float:
        """Of one micro-batch: what the state costs is of one step, and shared by its micro-batches."""
        return (self.stall + self.slowed) / self.num_micro_batches + self.streamed


def shares_allowed(
    profile: Profile, config: MemoryConfig, link: Link, num_micro_batches: int
) -> tuple[StateShares | None, ...]:
    """What `config.optimizer` allows to become of the state: None where all of it stays, else shares that may move. The
    first that may move have all fates that are allowed.

    Raises `ConfigError` where `swap` has nothing to move or no room for it.
    """
    if config.optimizer == "keep":
        return (None,)
    is_forced = config.optimizer == "swap"
    if is_forced:
        refuse_without_effect(profile.state, config)
    shares = shares_of(
        profile.state, link, config.host_budget, num_micro_batches=num_micro_batches, may_stay=not is_forced
    )
    if shares is None:
        return (None,)
    if is_forced:
        return (shares,)
    # A solver that counts in each micro-batch what one of them pays may leave too much where it is.
    all_move = dataclasses.replace(shares, fates=(Fate.SWAP, Fate.RECOMPUTE))
    return (None, shares, all_move) if num_micro_batches > 1 else (None, shares)


def bucket_temporaries(state: StateBytes, bucket_bytes: int) -> int:
    """What the optimizer needs beside one bucket: in proportion to the state whose parameters it steps at once."""
    at_once_bytes = state.optimizer_share_at_once * state.optimizer_movable
    return math.ceil(state.optimizer_temporaries * min(1.0, bucket_bytes / at_once_bytes))


def shares_of(
    state: StateBytes, link: Link, host_bytes: int | None, *, num_micro_batches: int = 1, may_stay: bool
) -> StateShares | None:
    """The state that can move and that the host takes, in at most 64 parts; None if there is none."""
    bucket_bytes = bucket_size(state, link)
    nbytes = state.optimizer_movable
    if host_bytes is not None and host_bytes < nbytes:
        nbytes = host_bytes // bucket_bytes * bucket_bytes
    if not nbytes:
        return None
    num_buckets = -(-nbytes // bucket_bytes)
    size = -(-num_buckets // _MOST_SHARES) * bucket_bytes
    whole, rest = divmod(nbytes, size)
    sizes = (size,) * whole + (rest,) * (rest > 0)
    rate = min(link.in_bytes_per_second, link.out_bytes_per_second)
    seconds = (link.latency_seconds * -(-nbytes // bucket_bytes) + nbytes / rate for nbytes in sizes)
    fates = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE) if may_stay else (Fate.SWAP, Fate.RECOMPUTE)
    return StateShares(
        sizes=sizes,
        fates=fates,
        streamed_seconds=tuple(one / num_micro_batches for one in seconds),
        slot_bytes=min(NUM_SLOTS * bucket_bytes, nbytes),
        temporaries=bucket_temporaries(state, bucket_bytes),
    )


def bucket_size(state: StateBytes, link: Link) -> int:
    """Bytes of state that are copied at once."""
    wanted = int(link.in_bytes_per_second * _BUCKET_SECONDS)
    usual = min(max(wanted, _LEAST_BUCKET), _MOST_BUCKET, -(-state.optimizer_movable // _LEAST_BUCKETS))
    return -(-max(usual, state.optimizer_unit, 1) // _ALIGNMENT) * _ALIGNMENT


def batch_tokens(profile: Profile) -> int | None:
    """Tokens of a micro-batch: of the first tensor of whole numbers with two dimensions; None where there is none."""
    match = re.search(r"int\d+\[(\d+), (\d+)\]", profile.batch)
    return None if match is None else int(match[1]) * int(match[2])


def placed_fates(placement: OptimizerPlacement, state: StateBytes, shares: StateShares) -> tuple[Fate, ...]:
    """The fate of each share, as `placement` has them: what stays, what travels beside compute, what is streamed."""
    stay = placement.resident_bytes - (state.optimizer_movable - shares.nbytes)
    beside = stay + placement.beside_bytes
    ends = [sum(shares.sizes[: number + 1]) for number in range(len(shares.sizes))]
    return tuple(Fate.KEEP if end <= stay else Fate.SWAP if end <= beside else Fate.RECOMPUTE for end in ends)


def refuse_without_effect(state: StateBytes, config: MemoryConfig) -> None:
    """Raises `ConfigError` where `memory.optimizer: swap | in_backward` has nothing to move, or no room for it."""
    host_bytes, way = config.host_budget, f"memory.optimizer: {config.optimizer}"
    if not state.optimizer:
        raise ConfigError(
            f"{way} has nothing to move: there is no optimizer, or it has no state; pass optimizer=, "
            "take its first step before this if it has none yet, or write optimizer: keep"
        )
    if not state.optimizer_movable:
        raise ConfigError(
            f"{way} has nothing to move: no tensor of the optimizer's state has 16,384 elements; write optimizer: keep"
        )
    if host_bytes is not None and host_bytes < state.optimizer_movable:
        raise ConfigError(
            f"{way} moves {format_bytes(state.optimizer_movable)}, more than the host budget of "
            f"{format_bytes(host_bytes)}; raise host_budget, or write optimizer: auto"
        )


def placed(found: WayPlan, reason: str) -> tuple[OptimizerPlacement, StateSeconds]:
    """Where the state is in this plan, and what it costs on its way; the played step is the only one that has all of
    that."""
    question, shares = found.way.question, found.way.shares
    state, movable_bytes = question.profile.state, question.profile.state.optimizer_movable
    in_backward = shares is not None and shares.frees_gradients
    beside_bytes, streamed_bytes = _moving(found) if shares is not None else (0, 0)
    moved_bytes = beside_bytes + streamed_bytes
    if shares is None or not (moved_bytes or in_backward):
        return OptimizerPlacement(moved_bytes=0, resident_bytes=movable_bytes, reason=reason), StateSeconds()
    lanes = _lane_seconds(found)
    seconds = _state_seconds(found, lanes)
    # Where memory is what some of it waits for, no length of the step makes it free.
    may_be_free = not in_backward and not seconds.streamed and not streamed_bytes
    placement = OptimizerPlacement(
        moved_bytes=moved_bytes,
        resident_bytes=movable_bytes - moved_bytes,
        beside_bytes=0 if in_backward else beside_bytes,
        tier=Tier.DISK if question.profile.device == "cpu" else Tier.HOST,
        bucket_bytes=shares.bucket_bytes if in_backward else bucket_size(state, question.link),
        num_slots=shares.num_places if in_backward else NUM_SLOTS,
        overlap="in_backward" if in_backward else "backward" if beside_bytes else "step",
        exposed_seconds=seconds.stall + seconds.streamed * question.num_micro_batches,
        slowed_seconds=seconds.slowed,
        free_from_tokens=_free_from(found, moved_bytes, lanes) if may_be_free else None,
        reason=reason,
    )
    return placement, seconds


def shared_seconds(found: WayPlan) -> float:
    """Of one micro-batch."""
    if found.way.shares is None or found.way.question.num_micro_batches == 1:
        return found.pass_seconds
    seconds = _state_seconds(found, _lane_seconds(found))
    return found.pass_seconds - seconds.played + seconds.shared


def _free_from(found: WayPlan, moved_bytes: int, lanes: Mapping[tuple[str, bool], float]) -> int | None:
    """By time alone: so many tokens make forward and backward long enough, at the rate of these activations."""
    question, step = found.way.question, found.problem.step
    tokens = batch_tokens(question.profile)
    forward = sum(tick.seconds for tick in step.ticks[: step.num_forward_ticks])
    # What activations leave of the lane that copies in, in backward, and of that which copies out, in forward.
    free_in, free_out = step.compute_seconds - forward - lanes["in", False], forward - lanes["out", False]
    if tokens is None or free_in <= 0 or free_out <= 0:
        return None
    link = question.link
    share = max(moved_bytes / link.in_bytes_per_second / free_in, moved_bytes / link.out_bytes_per_second / free_out)
    return math.ceil(share * tokens * question.num_micro_batches)


def _moving(found: WayPlan) -> tuple[int, int]:
    """Bytes of the shares that travel beside compute, and of those that come and go while the optimizer steps."""
    shares = found.way.shares
    assert shares is not None
    if shares.frees_gradients:
        return shares.nbytes, 0
    sizes = list(zip(shares.sizes, split(found.problem, found.fates)[1], strict=True))
    beside, streamed = (sum(size for size, own in sizes if own is fate) for fate in (Fate.SWAP, Fate.RECOMPUTE))
    return beside, streamed


def _lane_seconds(found: WayPlan) -> Mapping[tuple[str, bool], float]:
    """By lane, and by whether it is the state that it works for."""
    seconds: dict[tuple[str, bool], float] = defaultdict(float)
    for event in found.events():
        seconds[event.lane, event.name.startswith(NAME)] += event.end - event.start
    return seconds


def _state_seconds(found: WayPlan, lanes: Mapping[tuple[str, bool], float]) -> StateSeconds:
    shares, question = found.way.shares, found.way.question
    assert shares is not None
    streamed = 0.0
    if not shares.frees_gradients:  # else all of it travels in backward, in other items than shares
        _, fates = split(found.problem, found.fates)
        streamed = sum(one for one, own in zip(shares.streamed_seconds, fates, strict=True) if own is Fate.RECOMPUTE)
    return StateSeconds(
        stall=lanes["stall", True],
        slowed=question.link.compute_share * (lanes["out", True] + lanes["in", True]),
        streamed=streamed,
        num_micro_batches=question.num_micro_batches,
    )
