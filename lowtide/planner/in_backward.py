"""What a step needs if each parameter is updated, and its gradient freed, while backward runs.

What: `with_updates_in_backward` gives the profile of the same step under `swap_optimizer(overlap="in_backward")`
(optimizer/in_backward.py), and `account_in_backward` the account of it: everything kept, and the least that can be
reached. In it `gradients` are those in flight: of the bucket that waits for its last gradient, of the one that is
complete until the next gradient comes, and what is left for `step()`.

How: gradients come in the order of the profile, each once backward goes over to another module, as autograd adds it
then. A bucket is closed by the gradient that does not fit into it, and is gone when that one has come. Each byte of a
gradient stands for as many bytes of state. From the first gradient on the device holds three buckets of state, and what
the optimizer needs beside one of them.

Cost: linear in operators. Not covered: gradients that accumulate over micro-batches, and clipping, which both forbid
it; parameters whose gradients come in another order than the buckets were made in; compute that waits for copies
(benchmarks/optimizer_modes.py plays them).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.decisions import AccountLine
from lowtide.core.profile import Profile, StateBytes
from lowtide.planner.by_rules import problem_of
from lowtide.planner.memory_breakdown import memory_breakdown
from lowtide.planner.min_peak import UNREACHABLE, quick_floor
from lowtide.planner.place_state import NUM_SLOTS, bucket_size, bucket_temporaries
from lowtide.planner.problem import Problem
from lowtide.timeline.memory import Lifetimes, StepArrays, floor_curve, plain_curve
from lowtide.timeline.step import Link

if TYPE_CHECKING:
    from lowtide.config.memory import MemoryConfig


def account_in_backward(profile: Profile, config: MemoryConfig, link: Link) -> tuple[AccountLine, ...]:
    """Bytes at the worst moment with everything kept, and (planned) of the least that can be reached under the rules of
    `config`; empty where the host cannot take what they swap. The optimizer has state that can move."""
    problem = problem_of(with_updates_in_backward(profile, link), config)
    arrays = StepArrays.of(problem.step)
    needed_bytes, fates, _ = quick_floor(arrays, config.host_budget)
    if needed_bytes >= UNREACHABLE:
        return ()
    curves = plain_curve(problem.step), floor_curve(arrays, Lifetimes.of(arrays, fates))
    account = memory_breakdown(problem, curves[0].tolist(), curves[1].tolist())
    # Buckets are the optimizer's state, and no temporaries.
    plain_slots, least_slots = (_slots_at(problem, profile, link, int(curve.argmax())) for curve in curves)
    signs = {"optimizer state": 1, "head, loss, temporaries": -1}
    return tuple(
        dataclasses.replace(
            line,
            plain_bytes=line.plain_bytes + signs.get(line.what, 0) * plain_slots,
            planned_bytes=line.planned_bytes + signs.get(line.what, 0) * least_slots,
        )
        for line in account
    )


def _slots_at(problem: Problem, profile: Profile, link: Link, tick: int) -> int:
    """Bytes of buckets on the device in a tick."""
    is_last = tick >= len(problem.starts) - 1
    is_there = is_last or problem.profile.op_gradient_bytes[problem.starts[tick + 1] - 1] > 0
    return slot_bytes(profile.state, link) if is_there else 0


def slot_bytes(state: StateBytes, link: Link) -> int:
    """Bytes of buckets on the device while backward updates parameters."""
    return min(NUM_SLOTS * bucket_size(state, link), state.optimizer_movable)


def with_updates_in_backward(profile: Profile, link: Link) -> Profile:
    """The same step, with buckets of the state on the device from the first gradient on and none of the rest that can
    move, and with the gradients in flight alone."""
    state = profile.state
    bucket_bytes = bucket_size(state, link)
    beside = bucket_temporaries(state, bucket_bytes) + slot_bytes(state, link)
    made = np.asarray(profile.op_gradient_bytes, dtype=np.int64)
    in_flight = gradients_in_flight(profile, bucket_bytes * state.gradients // state.optimizer_movable)
    op_bytes = np.asarray(profile.op_bytes, dtype=np.int64) - made + in_flight + beside * (made > 0)
    return dataclasses.replace(
        profile,
        op_bytes=tuple(op_bytes.tolist()),
        op_gradient_bytes=tuple(in_flight.tolist()),
        state=dataclasses.replace(
            state,
            gradients=int(in_flight[-1]),
            optimizer=state.optimizer - state.optimizer_movable,
            optimizer_movable=0,
            optimizer_unit=0,
            optimizer_temporaries=beside,
        ),
    )


def gradients_in_flight(profile: Profile, bucket_bytes: int) -> np.ndarray:
    """Bytes of gradients that are there at each operator, where a bucket has the state of so many bytes of them."""
    made = np.asarray(profile.op_gradient_bytes, dtype=np.int64)
    new = np.maximum(np.diff(made, prepend=0), 0)
    paths = [name.rpartition(".")[0] for name in profile.op_names]
    freed = np.zeros(len(made), dtype=np.int64)
    bucket = 0
    waiting: list[int] = []
    for index, nbytes in enumerate(new.tolist()):
        if index and paths[index] != paths[index - 1]:  # autograd adds what the module before has made
            for gradient in waiting:
                if bucket and bucket + gradient > bucket_bytes:
                    freed[index] += bucket
                    bucket = 0
                bucket += gradient
            waiting = []
        waiting += [nbytes] * (nbytes > 0)
    return made - np.cumsum(freed)
