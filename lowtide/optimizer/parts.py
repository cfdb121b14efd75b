"""Which parameters step together: the parts of one step, and a large parameter's stretches.

What: `Parts` deals the parameters that have a gradient into `StepPart`s. A part is a bucket's parameters; or parameters
whose state stays on the device, or that have none yet, as many as have about a bucket of it: so the first step is
bounded too, and temporaries are those of one bucket however much stays. A bucket without any gradient is not moved. A
parameter whose state is larger than a bucket steps in stretches, one after the other in one part's turn, if that keeps
the bits (buckets.py).
One exception in torch's optimizers: SGD with momentum takes another way through all of a group when one momentum is
still missing, with other bits in bfloat16. Such a group steps as one part, once.

`Cut` is a large parameter in one step, `Stretch` a part of its elements. `show` makes a one-dimensional tensor of the
stretch, with its gradient and its state, as if it were a parameter; the optimizer steps it; `put_away` takes what the
optimizer has left. What has no elements (`step`, numbers) is copied for each stretch, so that each begins where the
whole parameter would, and is written back once, after the last one. In the first step each stretch makes its own part
of the state; the parameter's new bucket is filled part by part, and `optimizer.state` shows it once the last part is
there. Where no tier has room the parts are put together on the device.

Cost: a dictionary a group and part, some ten microseconds a stretch.
Not covered: the step itself (step.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from lowtide.optimizer.buckets import Buffer, StateBucket, StateChunk, ends_of, halves, in_order, is_cut_now, runs
from lowtide.optimizer.groups import Chosen, GroupSnapshot
from lowtide.optimizer.store import StateStore, entries_of
from lowtide.tensors.wrappers import inside, is_distributed, shell_of


@dataclass(slots=True)
class StepPart:
    """Parameters that step together, and the buckets that have their state; or a stretch of one parameter."""

    chosen: list[Chosen]
    buckets: list[StateBucket] = field(default_factory=list)
    """Which are fetched whole."""
    stretch: Stretch | None = None
    then: StepPart | None = None
    """What else steps in this part's turn: more of the parameter, or what there was no memory for at a time."""

    def chunks(self) -> list[StateChunk]:
        """What has to be on the device."""
        if self.stretch is None:
            return [bucket.whole for bucket in self.buckets]
        chunk = self.stretch.chunk()
        return [] if chunk is None else [chunk]

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for _, parameters in self.chosen for parameter in parameters]


@dataclass(slots=True)
class StepRun:
    """One step under way."""

    state: Any
    """`optimizer.state` when it began."""
    snapshot: GroupSnapshot
    call: Callable[[], Any]
    """The optimizer's own step, over whatever `param_groups` shows."""
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """The gradient of each parameter that steps, as it was when the step began."""
    parts: list[StepPart] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    """Numbers of the parts that have not stepped, in the order in which they will."""
    result: Any = None
    is_tainted: bool = False
    """Its last part stopped inside the optimizer's own step."""
    error: BaseException | None = None
    """What stopped it."""

    @property
    def can_resume(self) -> bool:
        """Whether it can go on: all of its gradients are known, and no part is half done."""
        return bool(self.gradients) and not self.is_tainted


class Parts:
    """See the module's text."""

    def __init__(self, store: StateStore) -> None:
        self._optimizer = store.optimizer
        self._store = store

    def all(self) -> list[StepPart]:
        """Parts for all parameters that have a gradient now."""
        self._store.refresh()
        groups = self._optimizer.param_groups
        active = [[p for p in group["params"] if p.grad is not None] for group in groups]
        number_of = {p: number for number, parameters in enumerate(active) for p in parameters}
        idle = [(number, list(group["params"])) for number, group in enumerate(groups) if not active[number]]
        together = {number for number, group in enumerate(groups) if self._steps_at_once(group, active[number])}
        staying, fresh, at_once = self._sorted_out(number_of, together)
        first, *others = self._in_runs(staying) or [[]]
        parts = [StepPart(sorted([*idle, *_by_group(first, number_of)], key=itemgetter(0)))]
        parts += [StepPart(_by_group(parameters, number_of)) for parameters in others]
        if at_once:
            parts.append(self.together(at_once, number_of, self.buckets_of(at_once)))
        done = {id(bucket) for part in parts for bucket in part.buckets}
        for bucket in self._store.buckets:
            bucket.was_idle = not any(p in number_of for p in bucket.parameters)
            if id(bucket) not in done:
                parts.append(self._of_whole(bucket, number_of))
        parts += [self._of_fresh(parameters, number_of) for parameters in self._in_runs(fresh)]
        parts = [part for part in parts if part.chosen]
        # Not even a gradient: the optimizer is called all the same, as without lowtide.
        return parts or [StepPart([])]

    def of_bucket(self, bucket: StateBucket, among: Collection[torch.Tensor]) -> StepPart | None:
        """A part for one bucket, of those of its parameters that are `among` these and have a gradient; None where one
        of their groups steps at once."""
        number_of = self._stepping_now([p for p in bucket.parameters if p in among])
        return self._of_whole(bucket, number_of) if number_of else None

    def without_bucket(self, parameters: list[torch.Tensor]) -> StepPart | None:
        """A part for parameters that have no bucket, as far as they have a gradient; None where there is none, or one
        of their groups steps at once."""
        number_of = self._stepping_now([p for p in parameters if p not in self._store.bucket_of])
        if not number_of:
            return None
        staying, fresh, _ = self._sorted_out(number_of, set())
        return StepPart(_by_group([*staying, *fresh], number_of)) if staying else self._of_fresh(fresh, number_of)

    def _stepping_now(self, parameters: list[torch.Tensor]) -> dict[torch.Tensor, int]:
        """The groups of those of these parameters that have a gradient; empty where one of them must step at once."""
        groups = self._optimizer.param_groups
        number_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        found = {p: number_of[p] for p in parameters if p in number_of and p.grad is not None}
        at_once = any(self._steps_at_once(groups[n], groups[n]["params"]) for n in set(found.values()))
        return {} if at_once else found

    def _in_runs(self, parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """These parameters, cut where about a bucket of state is full."""
        sizes = [self._store.step_bytes_of(parameter) for parameter in parameters]
        return [parameters[run.start : run.stop] for run in runs(sizes, self._store.bucket_bytes)]

    def _sorted_out(
        self, number_of: dict[torch.Tensor, int], together: set[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Parameters that step without moving anything, that will make state, and that must step at once."""
        store, state = self._store, self._optimizer.state
        staying, fresh, at_once = [], [], []
        for parameter, number in number_of.items():
            if number in together:
                at_once.append(parameter)
            elif parameter in store.bucket_of:
                continue
            elif parameter in store.residents or entries_of(state, parameter):
                staying.append(parameter)
            else:
                fresh.append(parameter)
        return staying, fresh, at_once

    def buckets_of(self, parameters: list[torch.Tensor]) -> list[StateBucket]:
        bucket_of = self._store.bucket_of
        return list({id(bucket_of[p]): bucket_of[p] for p in parameters if p in bucket_of}.values())

    def _of_whole(self, bucket: StateBucket, number_of: dict[torch.Tensor, int]) -> StepPart:
        """A part for those of a bucket's parameters that have a gradient."""
        parameter = bucket.parameters[0]
        if bucket.is_cut and parameter in number_of and is_cut_now(self._optimizer, parameter):
            ends = [chunk.end for chunk in bucket.chunks if chunk.end is not None]
            return one_by_one(number_of[parameter], Cut(self._store, parameter, bucket, ends).stretches())
        return self.together(bucket.parameters, number_of, [bucket])

    def _of_fresh(self, parameters: list[torch.Tensor], number_of: dict[torch.Tensor, int]) -> StepPart:
        """A part for parameters without state."""
        first, ratio = parameters[0], self._store.state_bytes_per_parameter_byte
        if len(parameters) == 1 and is_cut_now(self._optimizer, first):
            ends = ends_of(self._optimizer, first, ratio * first.element_size(), self._store.bucket_bytes)
            if ends:
                return one_by_one(number_of[first], Cut(self._store, first, None, ends).stretches())
        return StepPart(_by_group(parameters, number_of))

    def together(
        self, parameters: list[torch.Tensor], number_of: dict[torch.Tensor, int], buckets: list[StateBucket]
    ) -> StepPart:
        """A part for these parameters and for all others in their buckets, since a bucket is fetched once."""
        everyone = dict.fromkeys([*parameters, *(p for bucket in buckets for p in bucket.parameters)])
        return StepPart(_by_group([p for p in everyone if p in number_of], number_of), buckets)

    def _steps_at_once(self, group: dict[str, Any], active: list[torch.Tensor]) -> bool:
        if (
            not isinstance(self._optimizer, torch.optim.SGD)
            or not group.get("momentum")
            or group.get("foreach") is False
        ):
            return False
        state = self._optimizer.state
        missing = [entries_of(state, p).get("momentum_buffer") is None for p in active]
        return any(missing) and not all(missing)


def _by_group(parameters: list[torch.Tensor], number_of: dict[torch.Tensor, int]) -> list[Chosen]:
    chosen: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        chosen.setdefault(number_of[parameter], []).append(parameter)
    return sorted(chosen.items(), key=itemgetter(0))


def one_by_one(number: int, stretches: list[Stretch]) -> StepPart:
    """A part for the first of these stretches, and the others in its turn."""
    part: StepPart | None = None
    for stretch in reversed(stretches):
        part = StepPart([(number, [stretch.cut.parameter])], stretch=stretch, then=part)
    assert part is not None
    return part


# -- a large parameter ------------------------------------------------------------------------------------------------


class Cut:
    """A large parameter in one step. `bucket`: None in the first one."""

    def __init__(self, store: StateStore, parameter: torch.Tensor, bucket: StateBucket | None, ends: list[int]) -> None:
        self.store = store
        self.parameter = parameter
        self.bucket = bucket
        self.is_first_step = bucket is None
        self.ends = ends
        self.made: dict[Hashable, torch.Tensor] = {}
        """State that was made in this step, whole and on the device, since no tier has room for a bucket of it."""

    def stretches(self, start: int = 0) -> list[Stretch]:
        """Those from an element on."""
        pairs = zip([0, *self.ends], self.ends, strict=False)
        return [Stretch(self, begin, end) for begin, end in pairs if begin >= start]

    def halve(self) -> bool:
        """From now on stretches are half as long, where there is no memory for one; False if they are short already."""
        assert self.bucket is not None
        ends = halves(self.ends)
        if ends == self.ends:
            return False
        self.ends = ends
        self.bucket.cut(ends, self.store.engine)
        return True

    def take_in(self, stretch: Stretch, new: dict[Hashable, torch.Tensor]) -> None:
        """Keep state that the optimizer made for a stretch of a parameter that had none."""
        if self.bucket is None and not self.made and self.parameter not in self.store.residents:
            dtypes = {key: value.dtype for key, value in new.items()}
            self.bucket = self.store.begin_bucket(self.parameter, dtypes, self.ends)
        if self.bucket is not None and new.keys() == {entry.key for entry in self.bucket.entries}:
            self.store.put(stretch.chunk_of(self.bucket), [new[entry.key] for entry in self.bucket.entries])
            return
        local = inside(self.parameter.detach())
        shell = shell_of(self.parameter.detach())
        for key, value in new.items():
            if key not in self.made:
                whole = torch.empty_strided(local.size(), local.stride(), dtype=value.dtype, device=value.device)
                self.made[key] = whole if shell is None else shell(whole)
            in_order(inside(self.made[key]), stretch.start, stretch.end).copy_(value)

    def finish(self, rest: dict[Hashable, Any]) -> None:
        """After the last stretch: `optimizer.state` shows all of it, and `rest`, which has no elements."""
        store, bucket = self.store, self.bucket
        entries = store.optimizer.state[self.parameter] if rest or self.made or bucket is not None else {}
        for key, value in rest.items():
            own = entries.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                own.copy_(value)
            else:
                entries[key] = value
        entries.update(self.made)
        if is_distributed(self.parameter):
            increment_version(self.parameter)  # what is inside was written to, which its own counter does not see
        if bucket is None:
            return
        if bucket in store.unfinished:
            store.unfinished.remove(bucket)
            store.add_bucket(bucket)
        if bucket.resident is not None:  # a copy out had failed
            storage, bucket.resident = bucket.resident, None
            store.transfers.send(bucket.whole, (storage,))
            bucket.bind_host(store.optimizer.state)


@dataclass(slots=True, eq=False)
class Stretch:
    """Elements [start, end) of a parameter that is cut, in order of memory."""

    cut: Cut
    start: int
    end: int
    _shown: torch.Tensor | None = None
    _own: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    def chunk(self) -> StateChunk | None:
        """The part of the parameter's bucket that has to be on the device; None in the first step."""
        return None if self.cut.is_first_step or self.cut.bucket is None else self.chunk_of(self.cut.bucket)

    def chunk_of(self, bucket: StateBucket) -> StateChunk:
        return next(chunk for chunk in bucket.chunks if (chunk.start, chunk.end) == (self.start, self.end))

    def show(self, buffer: Buffer | None) -> torch.Tensor:
        """The stretch as a parameter of its own, with a gradient and with state in `buffer` (None: in its bucket)."""
        cut, chunk = self.cut, self.chunk()
        state, parameter = cut.store.optimizer.state, cut.parameter
        shown = in_order(inside(parameter.detach()), self.start, self.end)
        assert parameter.grad is not None
        shown.grad = in_order(inside(parameter.grad.detach()), self.start, self.end)
        tensors = [] if chunk is None else chunk.stretches(buffer)
        entries = [] if chunk is None else chunk.bucket.entries
        self._own = {entry.key: tensor for entry, tensor in zip(entries, tensors, strict=True)}
        begun = {
            key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in entries_of(state, parameter).items()
            if key not in self._own
        }
        if begun or self._own:
            state[shown] = {**begun, **self._own}
        self._shown = shown
        return shown

    def hide(self) -> dict[Hashable, Any]:
        """Take the stretch out of `optimizer.state`. Returns what was there."""
        shown, self._shown = self._shown, None
        return {} if shown is None else self.cut.store.optimizer.state.pop(shown, {})

    @torch.no_grad()
    def put_away(self, buffer: Buffer | None) -> None:
        """Send back what the optimizer has left, after it stepped."""
        cut = self.cut
        left, chunk = self.hide(), self.chunk()
        for key, own in self._own.items():
            if left[key] is not own:
                own.copy_(left[key])
        rest = {key: value for key, value in left.items() if key not in self._own}
        new = {key: value for key, value in rest.items() if isinstance(value, torch.Tensor) and value.dim()}
        if chunk is not None and buffer is not None:
            cut.store.send(chunk, buffer)
        self._own = {}
        if new:
            cut.take_in(self, new)
        if self.end == cut.ends[-1]:
            cut.finish({key: value for key, value in rest.items() if key not in new})
