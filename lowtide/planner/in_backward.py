"""What a step needs if each parameter is updated, and its gradient freed, while backward runs.

What: `updates_allowed` has the step under `swap_optimizer(overlap="in_backward")` (optimizer/in_backward.py). Its
gradients are those in flight: of the bucket that waits for its last gradient, of the one that is complete until the
next gradient comes, and what is left for `step()`.

How: gradients come in the order of the profile, each once backward goes over to another module, as autograd adds it
then. A bucket is closed by the gradient that does not fit into it, and is gone when that one has come. Each byte of a
gradient stands for as many bytes of state. From the first gradient on the device holds buckets of state in all places,
and what the optimizer needs beside one of them.

Each bucket is an item of the step that visits the device
(`Item.visit_bytes`): needed where its last gradient is there, and fetched once a place is free, on the lane of
activations. So both share one link and one budget. The places hold the state of one layer, since gradients come in
bursts: with three compute waits for every layer's MLP. The state of a parameter that fills `NUM_PLACES` of them (a
vocabulary) may stay: it is needed at once, at the beginning of backward or after its end. All plans of an `optimize`
are made so.

Cost: linear in operators. Not covered: gradients that accumulate over micro-batches, and clipping, which both forbid
it; parameters whose gradients come in another order than the buckets were made in.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lowtide.core.decisions import AccountLine
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.planner.memory_breakdown import OPTIMIZER, TEMPORARIES
from lowtide.planner.place_state import bucket_size, bucket_temporaries, refuse_without_effect
from lowtide.planner.problem import Problem
from lowtide.planner.state_items import NAME, StateShares
from lowtide.timeline.step import Item, Link

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig

NUM_PLACES = 8
"""At least, for buckets on the device, in a plan."""
_MOST_PLACES = 32
_LEAST_BUCKETS = 4 * NUM_PLACES
"""Of the state, in a plan."""


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
        large = sum(nbytes for nbytes in _new_gradients(profile).tolist() if nbytes > large_bytes)
        moved_bytes = self.nbytes - round(large * self.bytes_per_gradient_byte)
        if not large or moved_bytes <= self.slot_bytes:
            return self
        return dataclasses.replace(self, sizes=(moved_bytes,), large_bytes=large_bytes)

    def _closed(self, profile: Profile) -> list[tuple[int, int]]:
        """The operator at which each bucket is updated, and the bytes of its gradients."""
        ratio = self.bytes_per_gradient_byte
        return closed_buckets(profile, int(self.bucket_bytes / ratio) if ratio else self.bucket_bytes)

    def _stays(self, gradient_bytes: int) -> bool:
        return self.large_bytes is not None and gradient_bytes > self.large_bytes

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
                others=state.others + left * has_gradients,
                optimizer=state.optimizer - self.nbytes,
                optimizer_movable=0,
                optimizer_unit=0,
                optimizer_temporaries=beside,
            ),
        )

    def added_to(self, problem: Problem, profile: Profile) -> Problem:
        """`problem` of the freed step, with a visitor for each bucket (`Item.visit_bytes`): fetched when there is a
        place for it, needed when its own gradients are there. `profile`: the same step, with all gradients."""
        step, starts = problem.step, problem.starts
        last = len(starts) - 1
        ratio = self.bytes_per_gradient_byte
        closed = [(bisect.bisect_right(starts, op) - 1, nbytes) for op, nbytes in self._closed(profile)]
        left = int(_new_gradients(profile).sum()) - sum(nbytes for _, nbytes in closed)
        all_of_them = (*closed, (last, left))
        buckets = [(need, round(ratio * nbytes)) for need, nbytes in all_of_them if not self._stays(nbytes)]
        gradients = np.flatnonzero(_new_gradients(profile))
        first = bisect.bisect_left(starts, gradients[0] + 1) if len(gradients) else last
        items: list[Item] = []
        for need, nbytes in buckets:
            for size in _cut(nbytes, self.bucket_bytes):
                # A place is free once what was there has left.
                before = len(items) - self.num_places + 1
                free = first if before < 0 else items[before].reads[0]
                items.append(visitor(f"{NAME} {len(items)}", size, need, min(free, need), leave_bytes=size))
        return dataclasses.replace(problem, step=dataclasses.replace(step, items=(*step.items, *items)))

    def shown(self, account: Sequence[AccountLine], problem: Problem, tick: int) -> tuple[AccountLine, ...]:
        """Buckets are the optimizer's state, and no temporaries, in what is planned for a tick."""
        is_last = tick >= len(problem.starts) - 1
        is_there = is_last or problem.profile.op_gradient_bytes[problem.starts[tick + 1] - 1] > 0
        more = {OPTIMIZER: self.slot_bytes * is_there, TEMPORARIES: -self.slot_bytes * is_there}
        return tuple(
            dataclasses.replace(line, planned_bytes=line.planned_bytes + more.get(line.what, 0)) for line in account
        )


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
        visit_bytes=nbytes,
        leave_bytes=leave_bytes,
        fetch_from=free,
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


def _new_gradients(profile: Profile) -> np.ndarray:
    """Bytes of gradients that each operator makes."""
    return np.maximum(np.diff(np.asarray(profile.op_gradient_bytes, dtype=np.int64), prepend=0), 0)


def closed_buckets(profile: Profile, bucket_bytes: int) -> list[tuple[int, int]]:
    """The operator at which each bucket has been updated, and its gradients' bytes. What is left is updated when
    backward is over."""
    paths = [name.rpartition(".")[0] for name in profile.op_names]
    closed: list[tuple[int, int]] = []
    bucket = 0
    waiting: list[int] = []
    for index, nbytes in enumerate(_new_gradients(profile).tolist()):
        if waiting and paths[index] != paths[index - 1]:  # autograd adds what the module before has made
            for gradient in waiting:
                if bucket and bucket + gradient > bucket_bytes:
                    closed.append((index, bucket))
                    bucket = 0
                bucket += gradient
            waiting = []
        waiting += [nbytes] * (nbytes > 0)
    return closed
