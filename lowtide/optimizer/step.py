"""One step of an optimizer, part by part: fetch a bucket, step its parameters, send it back.

What: `Stepper.plan` says which parameters step together, `Stepper.run` steps them. While one part computes, the next
one's bucket arrives and the last one's leaves.
Why it is exact: an optimizer of torch treats each parameter by itself (or, with foreach, in lists whose members do not
touch each other), so a step over some parameters, then over the others, is the step over all of them. The optimizer's
own `step` does the work, with `param_groups` that show it some of the parameters.

A part is a bucket's parameters that have a gradient; or parameters whose state stays on the device, or that have none
yet, as many as have about a bucket of it: so the first step is bounded too, and temporaries are those of one bucket
however much stays. Parameters
without a gradient are skipped, and a bucket without any gradient is not moved; one with many of them is cut in two.
A parameter whose state is larger than a bucket steps in stretches, one part each, if that keeps the bits
(stretches.py).
One exception in torch's optimizers: SGD with momentum takes another way through all of a group when one momentum is
still missing, with other bits in bfloat16. Such a group steps as one part, once.

Where it stops: what failed before a part's own step leaves that part as it was (`PartialStepError`, can be resumed);
what failed inside may have updated half of its parameters, and nobody can tell which.
Cost: about 60 us of Python a part, and a dictionary a group and part.

Not covered: optimizers that look at several parameters at once (trial.py refuses them).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.errors import PartialStepError
from lowtide.optimizer.buckets import Bucket, StateBucket, StateChunk, runs
from lowtide.optimizer.cuts import Cut, Stretch
from lowtide.optimizer.groups import Chosen, GroupSnapshot
from lowtide.optimizer.store import StateStore, entries_of
from lowtide.optimizer.stretches import ends_of, is_cut_now
from lowtide.optimizer.transfers import Arrival
from lowtide.tensors.wrappers import inside


@dataclass(slots=True)
class StepPart:
    """Parameters that step together, and the buckets that have their state; or a stretch of one parameter."""

    chosen: list[Chosen]
    homes: list[StateBucket] = field(default_factory=list)
    """Which are fetched whole."""
    stretch: Stretch | None = None
    then: StepPart | None = None
    """What else steps in this part's turn: more of the parameter, or what there was no memory for at a time."""

    def pieces(self) -> list[StateChunk]:
        """What has to be on the device."""
        if self.stretch is None:
            return [home.whole for home in self.homes]
        piece = self.stretch.piece()
        return [] if piece is None else [piece]

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for _, parameters in self.chosen for parameter in parameters]


@dataclass(slots=True)
class StepRun:
    """One step under way."""

    snapshot: GroupSnapshot
    call: Callable[[], Any]
    """The optimizer's own step, over whatever `param_groups` shows."""
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Of each parameter that steps, when the step began."""
    parts: list[StepPart] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    """Numbers of the parts that have not stepped, in the order in which they will."""
    result: Any = None
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    """Buckets under way, by the identity of their piece."""
    is_tainted: bool = False
    """Its last part stopped inside the optimizer's own step."""

    @property
    def can_resume(self) -> bool:
        """Whether it can go on: all of its gradients are known, and no part is half done."""
        return bool(self.gradients) and not self.is_tainted


class Stepper:
    """See the module's text."""

    def __init__(self, optimizer: torch.optim.Optimizer, store: StateStore) -> None:
        self.optimizer = optimizer
        self.store = store
        self.transfers = store.transfers

    # -- which parameters step together --------------------------------------------------------------------------------

    def begin(self, call: Callable[[], Any], arrivals: dict[int, Arrival]) -> StepRun:
        """A step without any part yet. `arrivals` were fetched before."""
        self._check_devices()
        self.transfers.most_held = max(self.transfers.num_buffers, len(arrivals))
        return StepRun(GroupSnapshot(self.optimizer.param_groups), call, arrivals=arrivals)

    def _check_devices(self) -> None:
        device = self.store.device
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.device != device:
                    raise RuntimeError(
                        f"lowtide: a parameter is on {parameter.device}, and its optimizer was swapped for parameters "
                        f"on {device}; call handle.detach(), move the model, and swap the optimizer again (with "
                        "Accelerate: model.to(accelerator.device) first)"
                    )

    def add_all(self, run: StepRun) -> None:
        """Parts for all parameters that have a gradient now."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        run.gradients = {p: p.grad for p in parameters if p.grad is not None}
        parts = self.plan()
        run.todo += range(len(run.parts), len(run.parts) + len(parts))
        run.parts += parts

    def part_of(self, home: StateBucket, among: Collection[torch.Tensor]) -> StepPart | None:
        """A part for one bucket, of those of its parameters that are `among` these and have a gradient; None where one
        of their groups steps at once."""
        number_of = self._stepping_now([p for p in home.parameters if p in among])
        return self._of_home(home, number_of) if number_of else None

    def part_without_bucket(self, parameters: list[torch.Tensor]) -> StepPart | None:
        """A part for parameters that have no bucket, as far as they have a gradient; None where there is none, or one
        of their groups steps at once."""
        number_of = self._stepping_now([p for p in parameters if p not in self.store.home_of])
        if not number_of:
            return None
        staying, fresh, _ = self._sorted_out(number_of, set())
        return StepPart(_by_group([*staying, *fresh], number_of)) if staying else self._of_fresh(fresh, number_of)

    def _stepping_now(self, parameters: list[torch.Tensor]) -> dict[torch.Tensor, int]:
        """The groups of those of these parameters that have a gradient; empty where one of them must step at once."""
        groups = self.optimizer.param_groups
        number_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        found = {p: number_of[p] for p in parameters if p in number_of and p.grad is not None}
        at_once = any(self._steps_at_once(groups[n], groups[n]["params"]) for n in set(found.values()))
        return {} if at_once else found

    def fetch_ahead(self, run: StepRun, piece: StateChunk) -> None:
        """Start a bucket's way to the device before its part's turn, if there is memory."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self._start(run, piece)

    def plan(self) -> list[StepPart]:
        self.store.refresh()
        groups = self.optimizer.param_groups
        active = [[p for p in group["params"] if p.grad is not None] for group in groups]
        number_of = {p: number for number, parameters in enumerate(active) for p in parameters}
        idle = [(number, list(group["params"])) for number, group in enumerate(groups) if not active[number]]
        together = {number for number, group in enumerate(groups) if self._steps_at_once(group, active[number])}
        if not together:
            self.store.part_company(number_of.keys())
        staying, fresh, at_once = self._sorted_out(number_of, together)
        first, *others = self._in_runs(staying) or [[]]
        parts = [StepPart(sorted([*idle, *_by_group(first, number_of)], key=_number))]
        parts += [StepPart(_by_group(parameters, number_of)) for parameters in others]
        if at_once:
            parts.append(self._part(at_once, number_of, self._homes_of(at_once)))
        done = {id(home) for part in parts for home in part.homes}
        for home in self.store.homes:
            home.was_idle = not any(p in number_of for p in home.parameters)
            if id(home) not in done:
                parts.append(self._of_home(home, number_of))
        parts += [self._of_fresh(parameters, number_of) for parameters in self._in_runs(fresh)]
        parts = [part for part in parts if part.chosen]
        # Not even a gradient: the optimizer is called all the same, as without lowtide.
        return parts or [StepPart([])]

    def _in_runs(self, parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """These parameters, cut where about a bucket of state is full."""
        sizes = [self.store.state_bytes_of(parameter) for parameter in parameters]
        return [parameters[run.start : run.stop] for run in runs(sizes, self.store.bucket_bytes)]

    def _sorted_out(
        self, number_of: dict[torch.Tensor, int], together: set[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Parameters that step without moving anything, that will make state, and that must step at once."""
        store, state = self.store, self.optimizer.state
        staying, fresh, at_once = [], [], []
        for parameter, number in number_of.items():
            if number in together:
                at_once.append(parameter)
            elif parameter in store.home_of:
                continue
            elif parameter in store.residents or entries_of(state, parameter):
                staying.append(parameter)
            else:
                fresh.append(parameter)
        return staying, fresh, at_once

    def _homes_of(self, parameters: list[torch.Tensor]) -> list[StateBucket]:
        home_of = self.store.home_of
        return list({id(home_of[p]): home_of[p] for p in parameters if p in home_of}.values())

    def _of_home(self, home: StateBucket, number_of: dict[torch.Tensor, int]) -> StepPart:
        """All of a bucket that steps."""
        parameter = home.parameters[0]
        if home.is_cut and parameter in number_of and is_cut_now(self.optimizer, parameter):
            ends = [piece.end for piece in home.pieces if piece.end is not None]
            return _chain(number_of[parameter], Cut(self.store, parameter, home, ends).stretches())
        return self._part(home.parameters, number_of, [home])

    def _of_fresh(self, parameters: list[torch.Tensor], number_of: dict[torch.Tensor, int]) -> StepPart:
        """Parameters without state."""
        first, ratio = parameters[0], self.store.state_bytes_per_parameter_byte
        if len(parameters) == 1 and is_cut_now(self.optimizer, first):
            ends = ends_of(self.optimizer, first, ratio * first.element_size(), self.store.bucket_bytes)
            if ends:
                return _chain(number_of[first], Cut(self.store, first, None, ends).stretches())
        return StepPart(_by_group(parameters, number_of))

    def _part(
        self, parameters: list[torch.Tensor], number_of: dict[torch.Tensor, int], homes: list[StateBucket]
    ) -> StepPart:
        """These parameters, and with each home all that live there, since a home is fetched once."""
        everyone = dict.fromkeys([*parameters, *(p for home in homes for p in home.parameters)])
        return StepPart(_by_group([p for p in everyone if p in number_of], number_of), homes)

    def _steps_at_once(self, group: dict[str, Any], active: list[torch.Tensor]) -> bool:
        if (
            not isinstance(self.optimizer, torch.optim.SGD)
            or not group.get("momentum")
            or group.get("foreach") is False
        ):
            return False
        state = self.optimizer.state
        missing = [entries_of(state, p).get("momentum_buffer") is None for p in active]
        return any(missing) and not all(missing)

    # -- one part after the other --------------------------------------------------------------------------------------

    def run(self, run: StepRun) -> Any:
        """Step what is left of `run`. Returns what the optimizer's step returned last."""
        while run.todo:
            self.step_part(run, run.todo[0])
        self.give_up(run)
        run.snapshot.commit()
        self.transfers.retire_all()
        self.transfers.forget_complete()
        return run.result

    def step_part(self, run: StepRun, number: int) -> None:
        """Step one part; where it stops, say so and keep what can be kept."""
        while True:
            self._step_one(run, number)
            then = run.parts[number].then
            if then is None:
                break
            run.parts[number] = then
        run.todo.remove(number)

    def _step_one(self, run: StepRun, number: int) -> None:
        buckets: list[Bucket | None] = []
        try:
            self._fetch(run, number, buckets)
            part = run.parts[number]
            stretch = part.stretch
            shown = stretch.show(buckets[0] if buckets else None) if stretch is not None else None
            whole = [] if stretch is not None else self._bind(part, buckets)
            run.is_tainted = True
            self._step(run, part, shown)
        except BaseException as error:
            self._stop(run, run.parts[number], buckets)
            if not isinstance(error, Exception):
                raise  # of the user's making: Ctrl-C
            raise self._said(run, number, error) from error
        if stretch is not None:
            stretch.put_away(buckets[0] if buckets else None)
        else:
            self._put_away(part, whole)
        run.is_tainted = False

    def _bind(
        self, part: StepPart, buckets: list[Bucket | None]
    ) -> list[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
        """For each home of a part its bytes on the device, and what `optimizer.state` shows of them."""
        storages = [
            home.on_device() if bucket is None else bucket[0] for home, bucket in zip(part.homes, buckets, strict=True)
        ]
        state = self.optimizer.state
        return [(s, home.bind_device(state, s)) for home, s in zip(part.homes, storages, strict=True)]

    def _step(self, run: StepRun, part: StepPart, stretch: torch.Tensor | None) -> None:
        optimizer = self.optimizer
        own = optimizer.param_groups
        groups = run.snapshot.subset(part.chosen)
        if stretch is not None:
            groups[0]["params"] = [stretch]
        optimizer.param_groups = groups
        try:
            run.result = run.call()
        finally:
            optimizer.param_groups = own
        run.snapshot.collect(part.chosen, groups)

    def _fetch(self, run: StepRun, number: int, buckets: list[Bucket | None]) -> None:
        """Add the buckets of a part to `buckets`, on the device (None: they never left), and start the next part's."""
        while True:
            try:
                for piece in run.parts[number].pieces():
                    self._start(run, piece)
                break
            except torch.OutOfMemoryError:
                if not self._halve(run, number):
                    raise
        behind = run.parts[number].then
        if behind is None:
            following = run.todo.index(number) + 1
            behind = run.parts[run.todo[following]] if following < len(run.todo) else None
        for piece in behind.pieces() if behind is not None else ():
            self.fetch_ahead(run, piece)  # without memory now, it is fetched once this part's is free
        for piece in run.parts[number].pieces():
            arrival = run.arrivals.pop(id(piece), None)
            buckets.append(self.transfers.arrive(arrival) if arrival is not None else None)

    def _halve(self, run: StepRun, number: int) -> bool:
        """Cut the bucket of a part for which there is no memory in two, which step one after the other."""
        part = run.parts[number]
        if part.stretch is not None:
            return self._halve_stretches(run, number, part.stretch)
        if len(part.homes) != 1 or len(part.homes[0].parameters) < 2:
            return False
        home = part.homes[0]
        self._warn_of_halving(run, home.nbytes)
        self.store.adopt(home.parameters, anywhere=True, apart=set(home.parameters[: len(home.parameters) // 2]))
        number_of = {p: group for group, parameters in part.chosen for p in parameters}
        halves = [self._part(half.parameters, number_of, [half]) for half in self._homes_of(home.parameters)]
        then = part.then
        for half in reversed([half for half in halves if half.chosen]):
            half.then, then = then, half
        assert then is not None
        run.parts[number] = then
        return True

    def _halve_stretches(self, run: StepRun, number: int, stretch: Stretch) -> bool:
        """The same for what is left of a parameter that is cut; from now on its stretches are shorter."""
        part, nbytes = run.parts[number], sum(piece.nbytes for piece in run.parts[number].pieces())
        if not stretch.cut.halve():
            return False
        self._warn_of_halving(run, nbytes)
        run.parts[number] = _chain(part.chosen[0][0], stretch.cut.stretches(stretch.start))
        return True

    def _warn_of_halving(self, run: StepRun, nbytes: int) -> None:
        """And have nothing under way."""
        warnings.warn(
            f"lowtide: no memory on {self.store.device} for {nbytes} bytes of optimizer state at a time; this "
            "bucket is cut in two",
            RuntimeWarning,
            stacklevel=2,
        )
        self.give_up(run)
        self.transfers.settle()

    def _start(self, run: StepRun, piece: StateChunk) -> None:
        if piece.home.resident is None and id(piece) not in run.arrivals:
            run.arrivals[id(piece)] = self.transfers.fetch(piece)

    def _stop(self, run: StepRun, part: StepPart, buckets: list[Bucket | None]) -> None:
        """Show the state again as it was before this part, and let go of what was fetched."""
        run.snapshot.take_back()
        if part.stretch is not None:
            part.stretch.hide()
        for piece, bucket in zip(part.pieces(), buckets, strict=False):
            if bucket is not None:
                self.transfers.drop(bucket)
                if part.stretch is None:
                    piece.home.bind_host(self.optimizer.state)
        self.give_up(run)

    def give_up(self, run: StepRun) -> None:
        """Let go of buckets that were fetched and not used."""
        for arrival in run.arrivals.values():
            self.transfers.give_up(arrival)
        run.arrivals.clear()

    def _put_away(self, part: StepPart, whole: list[tuple[torch.UntypedStorage, list[torch.Tensor]]]) -> None:
        """Send the buckets back, and give what the optimizer made anew a home."""
        state = self.optimizer.state
        outgrown: dict[torch.Tensor, None] = {}
        for home, (bucket, tensors) in zip(part.homes, whole, strict=True):
            if self._holds_all(home, bucket, tensors):
                home.resident = None
                self.transfers.send(home.whole, (bucket,))
                home.bind_host(state)
            else:
                outgrown |= dict.fromkeys(home.parameters)
                self.store.part_from(home, bucket)
        new = self.store.homeless(parameter for parameter in part.parameters() if parameter not in outgrown)
        if new or outgrown:
            self.store.adopt([*outgrown, *(values[0][0] for values in new)])

    def _holds_all(self, home: StateBucket, bucket: torch.UntypedStorage, shown: list[torch.Tensor]) -> bool:
        """Whether the bucket has all that the optimizer left; tensors that it made anew are copied to their places."""
        state = self.optimizer.state
        for entry, tensor in zip(home.entries, shown, strict=True):
            now = entries_of(state, entry.parameter).get(entry.key)
            if now is tensor:
                continue
            local = inside(now) if isinstance(now, torch.Tensor) else None
            if local is None or (local.size(), local.stride(), local.dtype) != entry.shape[:2] + entry.shape[3:]:
                return False
            with torch.no_grad():
                entry.over(bucket).copy_(local)
        known = {(entry.parameter, entry.key) for entry in home.entries}
        return not any(
            (parameter, key) not in known
            for parameter in home.parameters
            for key in _movable_keys(self.store, parameter)
        )

    def _said(self, run: StepRun, number: int, error: Exception) -> PartialStepError:
        kind, count = type(self.optimizer).__name__, len(run.parts)
        if run.is_tainted:
            text = (
                f"{kind}.step failed inside part {number} of {count} ({type(error).__name__}: {error}); some of its "
                "parameters may be updated and others not, so it cannot be resumed: load a checkpoint"
            )
        elif not run.can_resume:
            text = (
                f"{kind}.step stopped before part {number} ({type(error).__name__}: {error}) within the backward pass, "
                "whose other gradients will not come: load a checkpoint"
            )
        else:
            text = (
                f"{kind}.step stopped before part {number} of {count} ({type(error).__name__}: {error}); the parts "
                "before it are updated and nothing is lost: call handle.resume() to go on with the same gradients"
            )
        return PartialStepError(text, bucket=number, can_resume=run.can_resume)


def _by_group(parameters: list[torch.Tensor], number_of: dict[torch.Tensor, int]) -> list[Chosen]:
    chosen: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        chosen.setdefault(number_of[parameter], []).append(parameter)
    return sorted(chosen.items(), key=_number)


def _chain(number: int, stretches: list[Stretch]) -> StepPart:
    """A part for the first of these stretches, and the others in its turn."""
    part: StepPart | None = None
    for stretch in reversed(stretches):
        part = StepPart([(number, [stretch.cut.parameter])], stretch=stretch, then=part)
    assert part is not None
    return part


def _number(chosen: Chosen) -> int:
    return chosen[0]


def _movable_keys(store: StateStore, parameter: torch.Tensor) -> list[Any]:
    return [key for values in store.homeless([parameter]) for _, key, _ in values]
