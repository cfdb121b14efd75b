"""What a step needs if each parameter is updated, and its gradient freed, while backward runs; and if the weights of
layers come for their turn, too.

What: `updates_allowed` has the step under `swap_optimizer(overlap="in_backward")` (optimizer/in_backward.py). Its
gradients are those in flight: of the bucket that waits for its last gradient, of the one that is complete until the
next gradient comes, and what is left for `step()`.

How: gradients come in the order of the profile, each once backward goes over to another module, as autograd adds it
then. A bucket is closed by the gradient that does not fit into it, and is gone when that one has come. Each byte of a
gradient stands for as many bytes of state. From the first gradient on the device holds buckets of state in all places,
and what the optimizer needs beside one of them.

Each bucket is an item of the step that visits the device
(`Item.visit`): needed where its last gradient is there, and fetched once a place is free, on the lane of
activations. So both share one link and one budget. The places hold the state of one layer, since gradients come in
bursts: with three compute waits for every layer's MLP. The state of a parameter that fills `NUM_PLACES` of them (a
vocabulary) may stay: it is needed at once, at the beginning of backward or after its end. All plans of an `optimize`
are made so.

`WeightsInTurn` is the same step whose layers are elsewhere too (`memory.weights: swap | auto`). Each layer visits the
device twice: needed where its forward begins, and where its backward does, or where it runs again for that; after that
it leaves, updated. The ticks count `NUM_LAYERS_HERE` layers. A layer is fetched once a place is free: in forward the
place of the layer that has ended, in backward that of the one before it, whose weights have to be copied out. Layers
that stay (`auto`) are spread evenly, so that the link works on while they compute.

    N* = tokens a step * seconds of the link for weights and optimizer state / seconds of computation

From so many tokens a step on the link is hidden, whatever the size of the model.
Cost: linear in operators; two items a layer. Not covered: gradients that accumulate over micro-batches, and clipping,
which both forbid it; parameters whose gradients come in another order than the buckets were made in; what is outside of
the layers, which stays; a layer that is called several times, which comes once here; disks.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import OptimizerPlacement, WeightsPlacement
from lowtide.core.fate import Fate, Tier
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.planner.place_state import batch_tokens, bucket_size, bucket_temporaries, refuse_without_effect
from lowtide.planner.problem import Problem, added_gradients, new_gradients
from lowtide.planner.space import WayPlan
from lowtide.planner.state_items import NAME, StateShares
from lowtide.timeline.events import Timeline
from lowtide.timeline.step import Item, Link, Visit
from lowtide.units import format_bytes

NUM_PLACES = 8
"""At least, for buckets on the device, in a plan."""
_MOST_PLACES = 32
_LEAST_BUCKETS = 4 * NUM_PLACES
"""Of the state, in a plan."""
NUM_LAYERS_HERE = 4
"""At a time: one that leaves, one that computes, and two that arrive."""
WEIGHTS = "weights of"
"""How the names of their items begin."""
_STAYING_PARTS = 2
"""`auto` may leave every second layer on the device."""


def updates_allowed(
    profile: Profile, config: MemoryConfig, link: Link, num_micro_batches: int
) -> tuple[UpdatesInBackward, ...]:
    """What `memory.optimizer: in_backward` asks for: with all of the state moving, and with that of large parameters
    on the device. Raises `ConfigError` where it cannot be done."""
    if num_micro_batches > 1:
        raise ConfigError(
            f"memory.optimizer: in_backward is for one backward pass a step, and this step has {num_micro_batches} "
            "micro-batches; write optimizer: auto, which fetches state under the last one's backward"
        )
    refuse_without_effect(profile.state, config)
    bucket_bytes = min(bucket_size(profile.state, link), -(-profile.state.optimizer_movable // _LEAST_BUCKETS))
    bucket_bytes = max(bucket_bytes, profile.state.optimizer_unit, 1)
    all_of_it = UpdatesInBackward.of(profile, bucket_bytes, _num_places(profile, bucket_bytes))
    return tuple(dict.fromkeys((all_of_it, all_of_it.without_large(profile))))


def _num_places(profile: Profile, bucket_bytes: int) -> int:
    """For buckets on the device: the state of one layer, and at most a quarter of all."""
    movable_bytes = profile.state.optimizer_movable
    layer_bytes = max(profile.layer_weights, default=0) / max(profile.state.parameters, 1) * movable_bytes
    places = min(layer_bytes, movable_bytes / 4) / bucket_bytes
    return min(max(math.ceil(places), NUM_PLACES), _MOST_PLACES)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesInBackward(StateShares):
    """All of an optimizer's state that can move, in buckets that come, are updated and leave while backward runs."""

    frees_gradients: ClassVar[bool] = True

    bytes_per_gradient_byte: float
    """State that belongs to it."""
    large_bytes: int | None = None
    """The state of parameters with gradients of more bytes stays on the device."""

    @classmethod
    def of(cls, profile: Profile, bucket_bytes: int, num_places: int) -> UpdatesInBackward:
        """All of the state moves."""
        state = profile.state
        return cls(
            sizes=(state.optimizer_movable,),
            fates=(Fate.SWAP,),
            streamed_seconds=(0.0,),
            bucket_bytes=bucket_bytes,
            num_places=num_places,
            bytes_per_gradient_byte=state.optimizer_movable / state.gradients,
            slot_bytes=min(num_places * bucket_bytes, state.optimizer_movable),
            temporaries=bucket_temporaries(state, bucket_bytes),
        )

    def without_large(self, profile: Profile) -> UpdatesInBackward:
        """The same where the state of parameters stays that fills many places: compute would wait for it."""
        large_bytes = int(NUM_PLACES * self.bucket_bytes / self.bytes_per_gradient_byte)
        large = sum(nbytes for nbytes in new_gradients(profile).tolist() if nbytes > large_bytes)
        moved_bytes = self.nbytes - round(large * self.bytes_per_gradient_byte)
        if not large or moved_bytes <= self.slot_bytes:
            return self
        return dataclasses.replace(self, sizes=(moved_bytes,), large_bytes=large_bytes)

    def _closed(self, profile: Profile) -> list[tuple[int, int]]:
        """The operator at which each bucket is updated, and the bytes of its gradients."""
        ratio = self.bytes_per_gradient_byte
        return closed_buckets(profile, int(self.bucket_bytes / ratio) if ratio else self.bucket_bytes)

    def here(self, profile: Profile, *, has_gradients: bool = False) -> Profile:
        """The step with no more than buckets and the gradients in flight. `has_gradients`: those that the last step
        left are there as zeros."""
        state, beside = profile.state, self.temporaries + self.slot_bytes
        made = np.asarray(profile.op_gradient_bytes, dtype=np.int64)
        in_flight = _in_flight(made, self._closed(profile))
        op_bytes = np.asarray(profile.op_bytes, dtype=np.int64) - made + in_flight + beside * (made > 0)
        left = int(in_flight[-1])
        return dataclasses.replace(
            profile,
            op_bytes=tuple(op_bytes.tolist()),
            op_gradient_bytes=tuple(in_flight.tolist()),
            state=dataclasses.replace(
                state,
                gradients=left,
                foreign=state.foreign + left * has_gradients,
                optimizer=state.optimizer - self.nbytes,
                optimizer_movable=0,
                optimizer_unit=0,
                optimizer_temporaries=beside,
            ),
        )

    def added_to(self, problem: Problem, profile: Profile) -> Problem:
        """`problem` of the freed step, with a visitor for each bucket (`Item.visit`): fetched when there is a
        place for it, needed when its own gradients are there. `profile`: the same step, with all gradients."""
        step, starts = problem.step, problem.starts
        last = len(starts) - 1
        ratio = self.bytes_per_gradient_byte
        closed = [(bisect.bisect_right(starts, op) - 1, nbytes) for op, nbytes in self._closed(profile)]
        left = int(new_gradients(profile).sum()) - sum(nbytes for _, nbytes in closed)
        all_of_them = (*closed, (last, left))
        most = math.inf if self.large_bytes is None else self.large_bytes
        buckets = [(need, round(ratio * nbytes)) for need, nbytes in all_of_them if nbytes <= most]
        gradients = np.flatnonzero(new_gradients(profile))
        first = bisect.bisect_left(starts, gradients[0] + 1) if len(gradients) else last
        items: list[Item] = []
        for need, nbytes in buckets:
            for size in _cut(nbytes, self.bucket_bytes):
                # A place is free once what was there has left.
                before = len(items) - self.num_places + 1
                free = first if before < 0 else items[before].reads[0]
                items.append(visitor(f"{NAME} {len(items)}", size, need, min(free, need), leave_bytes=size))
        return dataclasses.replace(problem, step=dataclasses.replace(step, items=(*step.items, *items)))

    def there(self, problem: Problem, fates: Sequence[Fate], timeline: Timeline) -> tuple[int, int]:
        """Buckets in their places, from the first gradient on."""
        tick = timeline.peak_tick
        is_last = tick >= len(problem.starts) - 1
        is_there = is_last or problem.profile.op_gradient_bytes[problem.starts[tick + 1] - 1] > 0
        return 0, self.slot_bytes * is_there


def visitor(name: str, nbytes: int, need: int, free: int, *, leave_bytes: int = 0) -> Item:
    """What comes from elsewhere for the tick `need`, once there is a place for it from the tick `free` on. It leaves
    with `leave_bytes`."""
    return Item(
        name=name,
        nbytes=0,
        born=0,
        saved=0,
        dies=0,
        reads=(need,),
        release=need + 1,
        fates=(Fate.SWAP,),
        visit=Visit(nbytes=nbytes, leave_bytes=leave_bytes, fetch_from=free),
    )


def _cut(nbytes: int, most: int) -> list[int]:
    """Equal parts, each of at most so many bytes."""
    count = -(-nbytes // most)
    return [nbytes * (part + 1) // count - nbytes * part // count for part in range(count)]


def _in_flight(made: np.ndarray, closed: Sequence[tuple[int, int]]) -> np.ndarray:
    freed = np.zeros(len(made), dtype=np.int64)
    for index, nbytes in closed:
        freed[index] += nbytes
    return made - np.cumsum(freed)


def closed_buckets(profile: Profile, bucket_bytes: int) -> list[tuple[int, int]]:
    """The operator at which each bucket has been updated, and its gradients' bytes. What is left is updated when
    backward is over."""
    closed: list[tuple[int, int]] = []
    bucket = 0
    for index, gradient in added_gradients(profile):
        if bucket and bucket + gradient > bucket_bytes:
            closed.append((index, bucket))
            bucket = 0
        bucket += gradient
    return closed


# -- weights of layers -------------------------------------------------------------------------------------------------


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
            come = 1 if layer in here else item.visit.nbytes  # it is there since its forward
            leave = round(trained * item.visit.nbytes)
            visit = dataclasses.replace(item.visit, nbytes=come, leave_bytes=leave)
            items.append(dataclasses.replace(item, visit=visit))
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


def placement_of(found: WayPlan, profile: Profile, link: Link, reason: str) -> WeightsPlacement:
    """Where a plan has the weights, and what that costs. `profile`: of the plain step."""
    shares, timeline, step = found.way.shares, found.timeline, found.problem.step
    total = sum(profile.layer_weights)
    if not isinstance(shares, WeightsInTurn):
        return WeightsPlacement(moved_bytes=0, resident_bytes=total, reason=reason)
    waits = (event for event in found.events() if event.lane == "stall" and event.name.startswith(WEIGHTS))
    in_bytes = sum(item.visit.nbytes for item in step.items)
    out_bytes = sum(item.visit.leave_bytes for item in step.items)
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
