"""Selective activation checkpointing whose offloaded outputs really leave the device, in eager mode.

What: a policy of `torch.utils.checkpoint` says of each operator's output whether it is saved, recomputed or offloaded
(`CheckpointPolicy.MUST_CPU_OFFLOAD`, `PREFER_CPU_OFFLOAD`). torch's own contexts recompute what is to be offloaded;
only its compiler offloads. A `SelectiveOffload` is a `context_fn` that follows the same policy and offloads.
How: one dispatch mode sees the forward pass of a checkpointed function (a *region*) and holds the outputs that are
saved (an alias) or offloaded (a site of the scheduler); a second one sees the region run again in backward, and gives
these outputs in place of running their operators.
Why it is safe: outputs are found by operator and number, as torch's contexts do; each is checked, when it is given, for
writes since. Two cases are exact here and are not in torch's contexts (decision 53): an operator that draws random
numbers and is not run again leaves the generators where it left them then, and an operator that writes to its inputs is
always run again.
Cost: a dispatch mode, some 10 us an operator of a region, as torch's contexts; some 30 us an offloaded output. In
backward the sites of the region before are fetched while a region runs.
Not covered: compiled regions, where torch's compiler reads the policy itself; outputs that are tensor subclasses
and conjugate or negative views (they are saved); generators of one's own, which `checkpoint` does not put back either.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
)

from lowtide.core.plan import Plan
from lowtide.engines.base import EngineChoice
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import OffloadedStorage, PrefetchQueue
from lowtide.runtime.saved.stats import Stats
from lowtide.tensors.compiled import CompiledMode
from lowtide.tensors.kinds import is_plain, tensors_in, written_arguments
from lowtide.tensors.modes import RandomState
from lowtide.tensors.private import (
    OpOverload,
    TorchDispatchMode,
    keeps_graph,
    schema_of,
    sharing_versions,
    storage_key,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from lowtide.tensors.view import Shape, may_overlap, part_of, version_alias
from lowtide.units import MIB

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
_MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD)

Policy = Callable[..., Any]


class SelectiveOffload:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint`. A context manager: leaving it closes it."""

    def __init__(
        self,
        policy: Policy,
        model: nn.Module,
        *,
        host_bytes: int | None = None,
        min_bytes: int = MIB,
        engine: EngineChoice = None,
    ) -> None:
        """See `lowtide.selective_offload`. `host_bytes`: cap on main memory for what is offloaded. `min_bytes`: what
        PREFER_CPU_OFFLOAD marks and is smaller is saved. Raises ConfigError."""
        if not callable(policy):
            raise ConfigError(
                "lowtide.selective_offload: policy is a function of (ctx, op, *args, **kwargs) that returns a "
                f"torch.utils.checkpoint.CheckpointPolicy, not {type(policy).__name__}"
            )
        if not isinstance(model, nn.Module):
            raise ConfigError(f"lowtide.selective_offload: expected a torch.nn.Module, not {type(model).__name__}")
        self.policy = policy
        self.min_bytes = min_bytes
        chosen = choose_engine(engine, model, Plan(layers=(), min_bytes=min_bytes, host_budget_bytes=host_bytes))
        self.engine = chosen
        self.scheduler = OffloadScheduler(chosen)
        if chosen is not engine:
            # It must outlive every graph that still has something on it: the last of them takes it down.
            weakref.finalize(self.scheduler, chosen.close)
        self._queue = PrefetchQueue()
        self._warned: set[Any] = set()
        self._is_closed = False

    def __call__(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """The contexts of one call of a checkpointed function: of its forward pass, and of its second run."""
        if self._is_closed:
            raise ConfigError("lowtide.selective_offload: it was closed; make a new one")
        region = _Region(self)
        return _Run(region, is_rerun=False), _Run(region, is_rerun=True)

    @property
    def stats(self) -> Stats:
        """Totals so far. Kept: what the policy saves. What is recomputed is not counted."""
        return self.scheduler.counters.totals(self.engine, peak_bytes=self.scheduler.ledger.peak_bytes)

    def close(self) -> None:
        """No region will follow. Graphs that are still alive keep working. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.scheduler.close()

    def __enter__(self) -> SelectiveOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<lowtide.SelectiveOffload {state}: engine '{self.engine.name}'>"

    def queue(self) -> PrefetchQueue:
        """The queue of the forward pass that is running: a new one once backward has read from the last."""
        if self._queue.task is not None:
            self.scheduler.window.note_pass(self._queue.swapped_bytes)
            self._queue = PrefetchQueue()
        return self._queue

    def decide(self, op: Any, output: Any, args: tuple, kwargs: dict) -> CheckpointPolicy:
        """What the policy says of this output, as a `CheckpointPolicy`. Raises ConfigError for anything else."""
        said = self.policy(SelectiveCheckpointContext(is_recompute=False, op_output=output), op, *args, **kwargs)
        if isinstance(said, bool):
            return CheckpointPolicy.MUST_SAVE if said else CheckpointPolicy.PREFER_RECOMPUTE
        if not isinstance(said, CheckpointPolicy):
            raise ConfigError(
                f"lowtide.selective_offload: the policy returned {said!r} for {op}; return a member of "
                "torch.utils.checkpoint.CheckpointPolicy"
            )
        if (said in _SAVES or said in _OFFLOADS) and _writes(op):
            # To skip it in the second run would be to skip what it writes.
            if said in _MUST and op not in self._warned:
                self._warned.add(op)
                warnings.warn(
                    f"lowtide: the policy holds the output of {op}, which writes to its inputs; it is run again all "
                    "the same, because what comes after it reads what it wrote",
                    stacklevel=2,
                )
            return CheckpointPolicy.PREFER_RECOMPUTE
        return said

    def is_movable(self, tensor: torch.Tensor, said: CheckpointPolicy) -> bool:
        """Whether this output is to leave the device, and can."""
        if said not in _OFFLOADS or not is_plain(tensor) or tensor.device.type != self.engine.device_type:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False  # its storage has other numbers than it shows
        if self.engine.device.index is not None and tensor.device.index != self.engine.device.index:
            return False
        least = self.min_bytes if said is CheckpointPolicy.PREFER_CPU_OFFLOAD else 1
        return tensor.untyped_storage().nbytes() >= least


@dataclass(eq=False)
class _Held:
    """An output that is held: on the device as an alias, so that no graph owns itself; or elsewhere, as a site."""

    counter: torch.Tensor
    """Tells of writes to it."""
    version: int
    at: torch.Tensor | OffloadedStorage
    shape: Shape | None = None
    """How the output looks at the site's bytes."""
    share: object = None

    @property
    def is_intact(self) -> bool:
        """Whether no counter tells of a write since."""
        return version_of(self.counter) == self.version

    def open(self) -> torch.Tensor:
        if isinstance(self.at, torch.Tensor):
            return self.at.detach()
        assert self.shape is not None
        return self.shape.over(self.at.read())


@dataclass(slots=True)
class _Output:
    """What one operator gave out: its tensors as handles, and the random states around it where it drew."""

    leaves: list[Any]
    tree: Any
    before: RandomState | None
    after: RandomState | None

    def give(self, op: Any, given: Any) -> Any:
        """The output of `op` once more, which is `given` these arguments. The generators go on from where they were
        after it, unless they were not put back to where they were before it."""
        if self.before is not None and self.after is not None and self.before.is_same(RandomState(tensors_in(given))):
            self.after.set()
        for leaf in self.leaves:
            if isinstance(leaf, _Held) and not leaf.is_intact:
                raise RuntimeError(
                    f"lowtide: an output of {op}, which the policy of selective checkpointing holds, was written to in "
                    "place after that; let the policy recompute it, or write to a copy"
                )
        opened = [leaf.open() if isinstance(leaf, _Held) else leaf for leaf in self.leaves]
        return tree_unflatten(opened, self.tree)


_RERUN = None
"""In place of an `_Output`: the operator runs again."""
_GIVEN = object()
"""In place of an `_Output`: it was given, in a backward pass that frees its graph."""


class _Region:
    """One call of a checkpointed function: the outputs that its second run is given, by operator and number."""

    def __init__(self, offload: SelectiveOffload) -> None:
        self.offload = offload
        self.outputs: dict[Any, list[Any]] = {}
        self.places: dict[int, list[tuple[StorageWeakRef, Shape, _Held, Any, int]]] = {}
        """By storage: which part of it is held, and as the output of which operator, by number."""
        self.overwritten: list[tuple[_Held, Any, int]] = []
        """Those that the last operator wrote to."""
        self.numbers: dict[Any, int] = {}
        self.queue: PrefetchQueue | None = None
        self.start = 0

    # -- forward ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.queue = self.offload.queue()
        self.start = len(self.queue.sites)

    def end(self) -> None:
        assert self.queue is not None
        self._forget_overwritten()
        self.places.clear()
        self.queue.turn(self.start)
        self.offload.scheduler.counters.num_forwards += 1

    def first(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Run `op`, and hold what the policy wants held."""
        before = RandomState(tensors_in((args, kwargs))) if _draws(op) else None
        output = op(*args, **kwargs)
        self._forget_overwritten()
        if _writes(op):
            self._note_overwritten(op, args, kwargs)
        said = self.offload.decide(op, output, args, kwargs)
        held: _Output | None = _RERUN
        if said in _SAVES or said in _OFFLOADS:
            held = self._hold(output, said, (args, kwargs), before)
        outputs = self.outputs.setdefault(op, [])
        if held is not _RERUN:
            for leaf, given in zip(held.leaves, tree_leaves(output), strict=True):
                if isinstance(leaf, _Held) and is_plain(given):
                    storage = given.untyped_storage()
                    place = (StorageWeakRef(storage), Shape.of(given), leaf, op, len(outputs))
                    self.places.setdefault(storage_key(storage), []).append(place)
        outputs.append(held)
        return output

    def _note_overwritten(self, op: Any, args: tuple, kwargs: dict) -> None:
        """An operator writes to these; counters tell of it once it has returned."""
        for tensor in written_arguments(op, args, kwargs):
            if not is_plain(tensor):
                continue
            for weak, shape, *place in self.places.get(storage_key(tensor.untyped_storage()), ()):
                if not weak.expired() and may_overlap(shape, Shape.of(tensor)):
                    self.overwritten.append(tuple(place))

    def _forget_overwritten(self) -> None:
        """What was written to is not held, if no counter of its own tells of it: chunks of the gates of a recurrent
        cell have one each. Its operator is run again."""
        for held, maker, number in self.overwritten:
            if held.is_intact:
                self.outputs[maker][number] = _RERUN
        self.overwritten.clear()

    def _hold(self, output: Any, said: CheckpointPolicy, given: Any, before: RandomState | None) -> _Output:
        leaves, tree = tree_flatten(output)
        after = RandomState(tensors_in(given)) if before is not None else None
        if before is not None and after is not None and before.is_same(after):
            before = after = None  # it could draw, and did not: attention without dropout
        owners = {
            storage_key(leaf.untyped_storage()): leaf
            for leaf in tree_leaves(given)
            if isinstance(leaf, torch.Tensor) and is_plain(leaf)
        }
        handles = [self._handle(leaf, owners, said) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return _Output(handles, tree, before, after)

    def _handle(self, tensor: torch.Tensor, owners: dict[int, torch.Tensor], said: CheckpointPolicy) -> Any:
        offload = self.offload
        if not is_plain(tensor):
            with sharing_versions():
                return _Held(tensor.detach(), version_of(tensor), tensor.detach())
        storage = tensor.untyped_storage()
        # A view counts writes with its base, but only once this operator has returned.
        owner = owners.get(storage_key(storage))
        counted = tensor if owner is None else owner
        with sharing_versions():
            held = _Held(version_alias(counted), version_of(counted), tensor.detach())
        if isinstance(owner, nn.Parameter) or not offload.is_movable(tensor, said):
            if owner is None:
                offload.scheduler.counters.kept_bytes += storage.nbytes()
                held.share = offload.scheduler.ledger.hold(held, storage.nbytes())
            return held
        part = part_of(counted)
        site = offload.scheduler.find(storage, held.version, part)
        if site is None:
            assert self.queue is not None
            site = offload.scheduler.enroll(self.queue, storage, held.version, None, part)
            offload.scheduler.start_offload(site, None)
        site.num_readers += 1
        held.at, held.shape = site, Shape.of(tensor)
        return held

    # -- backward --------------------------------------------------------------------------------------------------

    def rerun(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """The output that was held, or that of running `op` once more. Raises RuntimeError where the function does
        something else than in its forward pass."""
        number = self.numbers.get(op, 0)
        self.numbers[op] = number + 1
        outputs = self.outputs.get(op, [])
        if number >= len(outputs):
            raise RuntimeError(
                f"lowtide: {op} ran {number + 1} times in the second run of a checkpointed function, and "
                f"{len(outputs)} times in its forward pass; the function has to do the same each time"
            )
        held = outputs[number]
        if held is _RERUN:
            return op(*args, **kwargs)
        if held is _GIVEN:
            raise RuntimeError(
                "lowtide: this region was run again by a backward pass that freed what it held; to run backward "
                "through it twice, call the first one with retain_graph=True"
            )
        output = held.give(op, (args, kwargs))
        if not keeps_graph():
            outputs[number] = _GIVEN
        return output


class _Run(CompiledMode):
    """Sees the forward pass of a region, or the region run again."""

    supports_higher_order_operators = True

    def __init__(self, region: _Region, *, is_rerun: bool) -> None:
        super().__init__()
        self.region = region
        self.is_rerun = is_rerun

    def __enter__(self) -> Any:
        if self.is_rerun:
            self.region.numbers.clear()  # with retain_graph it may run more than once
        else:
            self.region.begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self.is_rerun:
            self.region.end()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        run = self.region.rerun if self.is_rerun else self.region.first
        return run(func, args, kwargs or {})


def _writes(op: Any) -> bool:
    """Whether an operator writes to its arguments. One of higher order has no schema of the kind."""
    return isinstance(op, OpOverload) and schema_of(op).is_mutable


def _draws(op: Any) -> bool:
    """Whether it may draw. What is not torch's own need not say so."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) or getattr(op, "namespace", "aten") != "aten"
