"""A step whose layers' weights come for their turn, as part of the one problem: `memory.weights: swap | auto`.

What: `WeightsInTurn` is `UpdatesInBackward` whose layers are elsewhere too. Each layer visits the device twice
(`Item.visit_bytes`): needed where its forward begins, and where its backward does, or where it runs again for that;
after that it leaves, updated. So weights, optimizer state and activations share the lanes, and one budget: the ticks
count `NUM_LAYERS_HERE` layers, the gradients in flight and the places of buckets.

A layer is fetched once a place is free: in forward the place of the layer that has ended, in backward that of the one
before it, whose weights have to be copied out. Layers that stay (`memory.weights: auto`) are spread evenly, so that the
link works on while they compute.

    N* = tokens a step * seconds of the link for weights and optimizer state / seconds of computation

From so many tokens a step on the link is hidden, whatever the size of the model.
Cost: two items a layer. Not covered: what is outside of the layers, which stays; a layer that is called several times,
which comes once here; many micro-batches for one stay of a layer; disks.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.core.decisions import OptimizerPlacement, WeightsPlacement
from lowtide.core.fate import Fate, Tier
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.planner.in_backward import UpdatesInBackward, updates_allowed, visitor
from lowtide.planner.place_state import batch_tokens
from lowtide.planner.problem import Problem
from lowtide.planner.space import Found
from lowtide.timeline.events import run
from lowtide.timeline.step import Item, Link
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

NUM_LAYERS_HERE = 4
"""At a time: one that leaves, one that computes, and two that arrive."""
WEIGHTS = "weights of"
"""How the names of their items begin."""
_STAYING_PARTS = 2
"""`auto` may leave every second layer on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInTurn(UpdatesInBackward):
    """Weights of these layers that come for their turn, beside optimizer state that visits for its update."""

    layers: tuple[str, ...]
    """In the order of forward."""
    layer_bytes: tuple[int, ...]
    """Of each of them."""

    @property
    def moved_bytes(self) -> int:
        """Of weights that are elsewhere between their turns."""
        return sum(self.layer_bytes)

    @property
    def window_bytes(self) -> int:
        """Of weights that are on the device at a time."""
        return min(NUM_LAYERS_HERE * max(self.layer_bytes), self.moved_bytes)

    @property
    def host_bytes(self) -> int:
        return self.nbytes + self.moved_bytes

    def here(self, profile: Profile, *, has_gradients: bool = False) -> Profile:
        """The step with a window of the layers' weights."""
        profile = UpdatesInBackward.here(self, profile, has_gradients=has_gradients)
        parameters = profile.state.parameters - self.moved_bytes + self.window_bytes
        return dataclasses.replace(profile, state=dataclasses.replace(profile.state, parameters=parameters))

    def added_to(self, problem: Problem, profile: Profile) -> Problem:
        """With two visitors for each layer."""
        problem = UpdatesInBackward.added_to(self, problem, profile)
        num_forward, names = profile.num_forward_ops, profile.op_names
        forward = _first_ops(names[:num_forward], self.layers, 0)
        backward = _first_ops(names[num_forward:], self.layers, num_forward)
        size = dict(zip(self.layers, self.layer_bytes, strict=True))
        trained = min(1.0, profile.state.gradients / profile.state.parameters)
        items = self._visits(problem, forward, size, NUM_LAYERS_HERE - 1)
        last = list(forward)[2 - NUM_LAYERS_HERE :]
        here = [layer for layer in list(backward)[: NUM_LAYERS_HERE - 2] if layer in last]
        for item in self._visits(problem, backward, size, NUM_LAYERS_HERE - 2):
            layer = item.name.removeprefix(f"{WEIGHTS} ")
            come = 1 if layer in here else item.visit_bytes  # it is there since its forward
            items.append(dataclasses.replace(item, visit_bytes=come, leave_bytes=round(trained * item.visit_bytes)))
        step = dataclasses.replace(problem.step, items=(*problem.step.items, *items))
        return dataclasses.replace(problem, step=step)

    def _visits(self, problem: Problem, first_ops: dict[str, int], size: dict[str, int], num_before: int) -> list[Item]:
        """One for each layer: its place is free when the layer begins that comes so many before it."""
        needs = [max(bisect.bisect_right(problem.starts, op) - 1, 0) for op in first_ops.values()]
        least = 0 if not needs or needs[0] < problem.step.num_forward_ticks else problem.step.num_forward_ticks
        items = []
        for number, (layer, need) in enumerate(zip(first_ops, needs, strict=True)):
            free = needs[number - num_before] if number >= num_before else least
            items.append(visitor(f"{WEIGHTS} {layer}", size[layer], need, min(free, need)))
        return items


def _first_ops(names: Sequence[str], layers: Sequence[str], start: int) -> dict[str, int]:
    """Of each layer the number of its first operator among these, in their order."""
    known = set(layers)
    found: dict[str, int] = {}
    for number, name in enumerate(names, start):
        path = name
        while path and path not in known:
            path = path.rpartition(".")[0]
        if path:
            found.setdefault(path, number)
    return found


def weights_allowed(
    profile: Profile, config: MemoryConfig, link: Link, num_micro_batches: int
) -> tuple[UpdatesInBackward, ...]:
    """What `memory.weights` asks for: the weights of all layers elsewhere, of every second one, or (`auto`) of none.

    Raises `ConfigError` where that cannot be done."""
    layers = [(name, nbytes) for name, nbytes in zip(profile.layers, profile.layer_weights, strict=False) if nbytes]
    way = f"memory.weights: {config.weights}"
    if not layers:
        raise ConfigError(
            f"{way} has nothing to move: no layer has a weight of 64 KiB and more; write weights: keep, or name the "
            "layers with 'layers'"
        )
    if num_micro_batches > 1:
        raise ConfigError(
            f"{way} is for one backward pass a step, and this step has {num_micro_batches} micro-batches; make the "
            "micro-batch as large as the step: activations make room"
        )
    all_of_it, *others = _updates(profile, config, link)
    best = others[-1] if others else all_of_it
    ways: list[UpdatesInBackward] = [_in_turn(updates, layers) for updates in dict.fromkeys((all_of_it, best))]
    if config.weights == "auto":
        ways += [_in_turn(best, layers[::_STAYING_PARTS]), best]
    limit = config.host_budget
    fitting = tuple(each for each in ways if limit is None or each.host_bytes <= limit)
    if not fitting:
        needed = min(each.host_bytes for each in ways)
        raise ConfigError(
            f"{way} moves {format_bytes(needed)} of weights and optimizer state, more than the host budget of "
            f"{format_bytes(limit or 0)}; raise host_budget"
        )
    return fitting


def in_turn_of(
    weights: WeightsPlacement | None, state: OptimizerPlacement, profile: Profile, config: MemoryConfig, link: Link
) -> UpdatesInBackward:
    """What a plan for this step, with its updates in backward, has chosen."""
    if weights is None:
        return next(each for each in updates_allowed(profile, config, link, 1) if each.nbytes == state.moved_bytes)
    ways = weights_allowed(profile, config, link, 1)
    return next(
        each
        for each in ways
        if each.nbytes == state.moved_bytes
        and weights.layers == (each.layers if isinstance(each, WeightsInTurn) else ())
    )


def _updates(profile: Profile, config: MemoryConfig, link: Link) -> tuple[UpdatesInBackward, ...]:
    """What becomes of gradients and optimizer state beside."""
    state = profile.state
    if state.optimizer_movable:
        return updates_allowed(profile, config, link, 1)
    none_moves = UpdatesInBackward(
        sizes=(),
        fates=(Fate.SWAP,),
        streamed_seconds=(),
        bucket_bytes=max(profile.layer_weights),
        bytes_per_gradient_byte=0.0,
        slot_bytes=0,
        temporaries=state.optimizer_temporaries,
    )
    return (none_moves,)


def _in_turn(updates: UpdatesInBackward, layers: Sequence[tuple[str, int]]) -> WeightsInTurn:
    fields = {field.name: getattr(updates, field.name) for field in dataclasses.fields(updates)}
    names, sizes = zip(*layers, strict=True)
    return WeightsInTurn(**fields, layers=names, layer_bytes=sizes)


def placement_of(found: Found, profile: Profile, link: Link, reason: str) -> WeightsPlacement:
    """Where a plan has the weights, and what that costs. `profile`: of the plain step."""
    shares, timeline, step = found.way.shares, found.timeline, found.problem.step
    total = sum(profile.layer_weights)
    if not isinstance(shares, WeightsInTurn):
        return WeightsPlacement(moved_bytes=0, resident_bytes=total, reason=reason)
    fixed: Any = {"evict_by": timeline.evict_by, "prefetch_at": timeline.prefetch_at}
    events = run(step, found.fates, link, **fixed, with_events=True).events
    waits = (event for event in events if event.lane == "stall" and event.name.startswith(WEIGHTS))
    in_bytes = sum(item.visit_bytes for item in step.items)
    out_bytes = sum(item.leave_bytes for item in step.items)
    copies = max(in_bytes / link.in_bytes_per_second, out_bytes / link.out_bytes_per_second)
    tokens, seconds = batch_tokens(profile), timeline.step_seconds - timeline.stall_seconds
    return WeightsPlacement(
        moved_bytes=shares.moved_bytes,
        resident_bytes=total - shares.moved_bytes,
        layers=shares.layers,
        tier=Tier.DISK if profile.device == "cpu" else Tier.HOST,
        window_bytes=shares.window_bytes,
        in_bytes=in_bytes,
        out_bytes=out_bytes,
        host_bytes=shares.host_bytes + timeline.slower_bytes,
        exposed_seconds=sum(event.end - event.start for event in waits),
        hidden_from_tokens=None if tokens is None else round(tokens * copies / seconds),
        reason=reason,
    )
