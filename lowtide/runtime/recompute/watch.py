"""What a recomputed module reads beside its inputs: set aside before its first run, put back around its second one.

What: a `Watch` is one recomputed module, from step to step. `Before` is what one run of it found. What is put back is
what can be compared in microseconds: the attributes, parameters, buffers, children and hooks of the module and of those
inside it; torch's settings and modes (tensors/modes.py), `requires_grad` flags. And what was *learned* in the module's
first run to move: a walk before it (tensors/snapshot.py) and a comparison after it find lists, objects, closures,
globals and generators, Python's and numpy's own among them; a dispatch mode (flow.py) finds the tensors that it writes
to, wherever they are.

Nothing of this must be complete. Whatever else a run reads, its second run saves other tensors, and their fingerprints
differ (region.py): refused by name. What only the part after the last saved tensor reads does not show there; so a
module's first second run goes to its end, and what it gives is compared too.

What cannot be put back is refused: a parameter, or a tensor of which there is no copy, that was written in place since,
or whose `.data` was exchanged. Plain autograd does the same for tensors that it saved; then the error has its words.

Cost, for a decoder layer with 13 modules: docs/history/LOG.md. A clone of each buffer up to 64 KiB, dropped again if
the run did not write to it. In a module's first run, and in the first under other `training` flags: 1 ms, and 20 us an
operator. Not covered: state that a region moves, that only others read, and that the walk does not reach; files and
what else has no state to read (an iterator is refused); objects of more than one thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.errors import RecomputeRefusedError
from lowtide.runtime.recompute.call import Call
from lowtide.runtime.recompute.flow import Flow
from lowtide.runtime.recompute.saves import Path
from lowtide.tensors.compiled import has_compiled
from lowtide.tensors.fsdp import fsdp_modules, is_gathered_of
from lowtide.tensors.kinds import can_be_cloned, is_plain, modules_of, swapped_weights_of
from lowtide.tensors.modes import Modes
from lowtide.tensors.private import (
    FORWARD_HOOK_FLAGS,
    FORWARD_HOOKS,
    GLOBAL_FORWARD_HOOKS,
    MODULE_TABLES,
    disable_current_modes,
    is_forward_mode,
    own_parameters,
    set_versions,
    storage_at,
    version_of,
)
from lowtide.tensors.remembered import NOTHING, Attributes, Held, Name, Record, State, fill, without_wrappers_of
from lowtide.tensors.snapshot import Snapshot, host_generators, is_iterator, take
from lowtide.tensors.view import byte_view, same_bytes
from lowtide.tensors.wrappers import inside

_SMALL_BYTES = 2**16
_OF_MODULES = frozenset(vars(nn.Module()))
Lent = tuple[nn.Module, str, nn.Parameter]
"""A module, the name of a parameter of it, and the tensor that played it."""
_MAX_LEARNED = 4
"""Runs that are watched until one brings nothing new."""
_WHOLE = 64
"""One second run in so many goes to its end."""


class Watch:
    """One recomputed module, from run to run."""

    def __init__(
        self, module: nn.Module, model: nn.Module, has_drawn: threading.Event, *, is_planned: bool = False
    ) -> None:
        """`has_drawn`: of `PlanContext`. `is_planned`: a solved plan runs it again, not a rule."""
        self.is_planned = is_planned
        self.keeps_collectives = False
        """What its collectives give is kept, and they are not issued again (collectives.py)."""
        self.refusal = ""
        """Why it could not be run again in some step, in words."""
        self.differs = False
        """A second run gave something else than the first: it is not run again."""
        self.frees = self.writes_inputs = False
        """Some run of it has let bytes go; was seen to write into its inputs."""
        self.module = module
        self._model = ref(model)  # a graph that the model keeps would keep the model
        self.has_drawn = has_drawn
        self.has_shards = bool(fsdp_modules(model))
        weights = swapped_weights_of(model)
        self.weights: Callable[[], Any] = (lambda: None) if weights is None else ref(weights)
        """Gives what knows the weights that come and go; None where all stay."""
        self.num_runs = 0
        self.marks: dict[int, tuple[int, int]] = {}
        """Of tensors that are no parameters, by identity, at the end of the last run."""
        self._tree: Tree | None = None
        self.known: defaultdict[tuple, Known] = defaultdict(Known)
        """By the `training` flags of the module and those inside of it."""

    def tree(self) -> Tree:
        """The modules and what they hold now; the same object as last time while nothing has moved."""
        tree = self._tree
        if tree is None or not tree.is_still():
            tree = Tree(self.module, has_shards=self.has_shards)
            tree.addressed = self.addressed_of(tree.tensors)
            # Others must not be held until the next run.
            self._tree = tree if tree.is_light else None
        return tree

    def addressed_of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that have an address, and keep it while nobody exchanges their data."""
        found = [tensor for tensor in tensors if is_plain(tensor)]
        weights = self.weights()
        return found if weights is None else [each for each in found if not weights.moves(each)]

    def refusal_of(self, message: str) -> RecomputeRefusedError:
        """The error that says why the module cannot be run again; noted for whoever plans."""
        self.refusal = message
        return RecomputeRefusedError(message, self.path(), can_stay=self.is_planned)

    def __str__(self) -> str:
        """The module in words: its path in the model, and its class."""
        path = self.path()
        return f"'{path}' ({type(self.module).__name__})" if path else type(self.module).__name__

    def path(self) -> str:
        model = self._model()
        names = () if model is None else model.named_modules()
        return next((name for name, module in names if module is self.module), "")

    def name_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is, from the module on."""
        for name, module in self.module.named_modules():
            held = chain(*(vars(module)[table].items() for table in MODULE_TABLES[:2]), vars(module).items())
            for key, value in held:
                if value is tensor:
                    return f"{name}.{key}".lstrip(".")
        return f"of shape {list(tensor.shape)}"


class Marks:
    """What changes when somebody writes to one of some tensors, or exchanges its data, as it is now."""

    def __init__(self, tensors: list[torch.Tensor], addressed: list[torch.Tensor]) -> None:
        """`addressed`: those of them that have an address."""
        self.tensors = tensors
        self._addressed = addressed
        self.values = [*map(version_of, tensors), *map(torch.Tensor.data_ptr, addressed)]

    def again(self) -> Marks:
        """Of the same tensors, as they are by then."""
        return Marks(self.tensors, self._addressed)

    def versions(self) -> list[int]:
        """How often each has been written to by now."""
        return [*map(version_of, self.tensors)]

    def moved(self, later: Marks) -> list[torch.Tensor]:
        """Those tensors that have another version or address in `later`."""
        if self.values == later.values:
            return []
        then, now = self.by_tensor(), later.by_tensor()
        return [each for each in self.tensors if then[id(each)] != now[id(each)]]

    def by_tensor(self) -> dict[int, tuple[int, int]]:
        """Version and address of each, by identity."""
        addresses = dict(zip(map(id, self._addressed), self.values[len(self.tensors) :], strict=True))
        versions = zip(map(id, self.tensors), self.values, strict=False)
        return {key: (version, addresses.get(key, 0)) for key, version in versions}


class Known:
    """What the runs of a module under some `training` flags have shown."""

    def __init__(self) -> None:
        self.is_settled = False
        """A whole run brought nothing new."""
        self.has_functions = False
        """Some run had `autograd.Function`s that keep tensors on `ctx`."""
        self.functions_stay = False
        """What they keep is not taken off them."""
        self.num_learned = 0
        self.is_compared = False
        """A second run of its own has gone to its end, and gave what the first gave."""
        self.num_paths = 0
        self.path: Path | None = None
        """What a run saves, if that is the same in each."""
        self.records: list[Any] = []
        """Containers, objects, closures, generators and context variables that move."""
        self.variables: set[contextvars.ContextVar] = set()
        """The context variables among them."""
        self.moving: set[int] = set()
        """Identities of tensors of the modules' own that a run writes to."""
        self.tree: Callable[[], Tree | None] = lambda: None
        """That of the last run."""
        self.written: list[tuple[StorageWeakRef, ref[torch.Tensor]]] = []
        """Other tensors that it writes to."""
        self.read: list[ref[torch.Tensor]] = []
        """Other tensors that it reads."""

    def others(self) -> list[torch.Tensor]:
        return [tensor for tensor in (weak() for weak in self.read) if tensor is not None]


class Tree:
    """A module and those inside of it: the objects that they hold, compared by identity."""

    def __init__(self, module: nn.Module, *, has_shards: bool) -> None:
        modules = modules_of(module)
        self._own = [vars(each) for each in modules]
        tables = MODULE_TABLES[1:] if has_shards else MODULE_TABLES
        self._tables = [own[name] for own in self._own for name in tables]
        self._hooks = [own[name] for own in self._own for name in (*FORWARD_HOOKS, *FORWARD_HOOK_FLAGS)]
        self._hooks += GLOBAL_FORWARD_HOOKS
        self._dicts = [*self._own, *self._tables, *self._hooks]
        self._full = [each for each in self._dicts if each]
        self._empty = [each for each in self._dicts if not each]  # most of them
        self._values = self._now()
        self._then = _copies(self._dicts)
        held = chain.from_iterable(each.values() for each in (*self._own, *self._tables))
        tensors = {id(value): value for value in held if isinstance(value, torch.Tensor)}
        # Inference tensors have no version, and nobody can write to them outside of inference mode.
        self.tensors = [each for each in tensors.values() if not each.is_inference()]
        if has_shards:
            self.tensors = [each for each in self.tensors if not isinstance(each, nn.Parameter)]
        self.addressed: list[torch.Tensor] = []
        self.flags = tuple([own.get("training", True) for own in self._own])
        """Which modules are in training."""
        self.has_compiled = has_compiled(module)
        attributes = chain.from_iterable(own.items() for own in self._own)
        self.iterator = next((name for name, value in attributes if is_iterator(value)), "")
        """Its name, if an attribute is one."""
        sizes = [_bytes_to_copy(each) for each in self.tensors]
        self.small = [index for index, size in enumerate(sizes) if 0 < size <= _SMALL_BYTES]
        buffers = {id(each) for own in self._own for each in own[MODULE_TABLES[1]].values()}
        # What lives as long as the module anyway, or is small.
        self.is_light = all(
            each.grad_fn is None and (size <= _SMALL_BYTES or id(each) in buffers)
            for each, size in zip(self.tensors, sizes, strict=True)
        )

    def _now(self) -> tuple:
        return tuple(chain.from_iterable(map(dict.values, self._full)))

    def is_still(self) -> bool:
        """Whether all attributes, tables and hooks hold the very objects that they held."""
        now = self._now()
        return len(now) == len(self._values) and not any(self._empty) and all(map(is_, now, self._values))

    def put_back(self, stack: contextlib.ExitStack) -> None:
        """Have all held that was held, until `stack` is left."""
        if self.is_still():
            stack.callback(self.put_if_moved)
        else:
            stack.callback(self._put, _copies(self._dicts))
            self._put(self._then)

    def put_if_moved(self) -> None:
        """Have all held that was held."""
        if not self.is_still():
            self._put(self._then)

    def _put(self, then: list[dict]) -> None:
        num_hooks = len(self._hooks)
        for index, (value, wanted) in enumerate(zip(self._dicts, then, strict=True)):
            _fill(value, wanted, are_hooks=index >= len(self._dicts) - num_hooks)


def _copies(dicts: list[dict]) -> list[dict]:
    return [dict(value.items()) if value else {} for value in dicts]


def _fill(value: dict, then: dict, *, are_hooks: bool) -> None:
    """Give a dictionary the items `then`, but for what lowtide itself has put there: wrappers, and hooks that come and
    go in any thread."""
    now = dict(OrderedDict.items(value) if isinstance(value, OrderedDict) else value.items())
    if are_hooks:
        ours = {key: hook for key, hook in now.items() if _is_our_hook(hook)}
        wanted = {key: hook for key, hook in then.items() if not _is_our_hook(hook)} | ours
    else:
        wanted = without_wrappers_of(then, now)
    if [*now] != [*wanted] or not all(map(is_, now.values(), wanted.values())):
        fill(value, wanted, in_order=are_hooks)


def _is_our_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("lowtide.")


def _bytes_to_copy(tensor: torch.Tensor) -> int:
    """Parameters are never copied, nor what torch cannot copy; a module that writes to those of its own is refused."""
    if isinstance(tensor, nn.Parameter) or not is_plain(tensor) or not can_be_cloned(tensor):
        return 0
    return tensor.untyped_storage().nbytes()


class Before:
    """What a module read before a run, for the second run."""

    def __init__(self, watch: Watch, call: Call, *, is_first: bool) -> None:
        """`is_first`: each tensor that the run saves is looked at. Raises RecomputeRefusedError for what cannot be
        wound back."""
        self.watch = watch
        self._modes = Modes()
        self._tree = tree = watch.tree()
        self._refuse_iterator(tree.iterator)
        self.known = known = watch.known[tree.flags]
        others = known.others()
        tensors = [*tree.tensors, *others] if others else tree.tensors
        addressed = [*tree.addressed, *watch.addressed_of(others)] if others else tree.addressed
        self._marks = Marks(tensors, addressed)
        self._flags = _flags_of(tree.tensors)
        self._parameters = _lent_parameters(watch.module) if watch.has_shards else []
        self._records = [record.again() for record in known.records]
        self._given = _without_modules(self._walk(call.objects).records()) if call.objects else []
        self._learning: tuple[Snapshot, list[State], contextvars.Context] | None = None
        """What there was before a first run that is to show what it moves."""
        self.flow: Flow | None = None
        if not known.is_settled and known.num_learned < _MAX_LEARNED:
            names = {str(record.name) for record in known.records if isinstance(record, State)}
            generators = [each for each in host_generators() if str(each.name) not in names]
            walked = self._walk([watch.module, call.own_forward()])
            self._learning = walked, generators, contextvars.copy_context()
        self.path = None if is_first else known.path
        is_open = known.path is None and known.num_paths < _MAX_LEARNED
        if is_open and not is_forward_mode() and not tree.has_compiled:
            self.flow = Flow(call.tensors, is_sharded=watch.has_shards)
        self.is_whole = self._learning is not None or not known.is_compared or watch.num_runs % _WHOLE == 0
        """Its second run goes to its end, and what it gives is compared."""
        watch.num_runs += 1
        if watch.marks:
            now = self._marks.by_tensor()
            known.moving |= {
                key for key, mark in watch.marks.items() if now.get(key, mark) != mark
            }  # others write to it
        views = {}
        if tree.small or known.moving:
            views = {
                id(tensor): tensor.untyped_storage()
                for index, tensor in enumerate(tree.tensors)
                if index in tree.small or (id(tensor) in known.moving and _bytes_to_copy(tensor))
            }
        for weak, found in known.written:
            storage = storage_at(weak.cdata)
            if storage is not None:
                views[_key_of(found(), weak)] = storage
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Of tensors, by identity: the bytes of their storage, and what they were."""
        if views:
            with disable_current_modes():
                self._copies = {key: (view := byte_view(storage), view.clone()) for key, storage in views.items()}

    def _walk(self, roots: list[Any]) -> Snapshot:
        modules = [root for root in roots if isinstance(root, nn.Module)]
        beside = [root for root in roots if root is not None and not isinstance(root, nn.Module)]
        found = take(*modules, beside=beside or None, code=True, process=False)
        found.forget_tensors()  # the run itself shows what is written to, and no budget knows the copies
        self._refuse_iterator(found.iterator)
        return found

    def _refuse_iterator(self, name: str) -> None:
        if name:
            raise self.watch.refusal_of(
                f"lowtide: the recomputed {self.watch} can reach an iterator, '{name}', and an iterator cannot be "
                "wound back to run the module again. Give it the fate keep or swap, or keep the position as a number."
            )

    @property
    def has_compiled(self) -> bool:
        """Whether the module has compiled parts."""
        return self._tree.has_compiled

    @property
    def looks_at_functions(self) -> bool:
        """Whether what `autograd.Function`s keep on `ctx` is to be taken off after the run (functions.py)."""
        if self.has_compiled or self.known.functions_stay or is_forward_mode():
            return False
        return self.known.has_functions or self.flow is not None or self.is_whole

    def keep_path(self, path: Path | None) -> bool:
        """The run has followed or shown a path; None if it left the known one, or went off any. Returns whether its
        second run is to go to its end."""
        known = self.known
        if path is not None:
            if path is not known.path:
                known.path, known.num_paths = path, known.num_paths + 1
        elif self.path is not None:
            known.path, self.is_whole = None, True
        return self.is_whole

    def settle(self) -> None:
        """The first run is over: learn what it moved, and let go of the copies that are not needed. Raises
        RecomputeRefusedError if it wrote to a tensor of which there is no copy."""
        known, watch, is_new = self.known, self.watch, self._learning is not None
        if self._learning is not None:
            found = self._moved_by_now()
            self._records += found
            known.records += found
            known.variables |= self._variables(self._learning[2]).keys()
            known.num_learned += 1
            known.is_settled = not found and self._tree.is_still()
            self._learning = None
        if self.flow is not None:
            self._learn(self.flow)
        elif known.path is None or known.tree() is not self._tree:  # other tensors may be statistics of a norm
            with disable_current_modes():
                known.moving |= {key for key, (view, then) in self._copies.items() if not same_bytes(view, then)}
        known.tree = ref(self._tree)
        now = self._marks.again()
        moved = self._marks.moved(now)
        for tensor in moved:
            if id(tensor) not in self._copies:
                raise self.watch.refusal_of(
                    f"lowtide: the recomputed {self.watch} wrote to its {_kind(tensor)} '{self.watch.name_of(tensor)}' "
                    "in its own forward, and there is no copy of it to run it again from. Give it the fate keep or "
                    "swap."
                )
        known.moving |= {id(tensor) for tensor in moved}
        watch.marks = now.by_tensor() if any(type(tensor) is not nn.Parameter for tensor in now.tensors) else {}
        if self._copies and not is_new:
            needed = known.moving | {_key_of(found(), weak) for weak, found in known.written}
            self._copies = {key: copy for key, copy in self._copies.items() if key in needed}

    def _moved_by_now(self) -> list[Any]:
        """What the first run has moved and others did not, while that is being learned."""
        if self._learning is None:
            return []
        walked, generators, context = self._learning
        drawn = [each for each in generators if not each.is_same()]
        return [*_without_modules(walked.changed()), *drawn, *self._variables(context).values()]

    def _variables(self, then: contextvars.Context) -> dict[contextvars.ContextVar, Held]:
        """The context variables that the first run has set to something else, with what they were."""
        return {
            variable: then.run(_held, variable)
            for variable, value in contextvars.copy_context().items()
            if variable not in self.known.variables and then.get(variable, NOTHING) is not value
        }

    def _learn(self, flow: Flow) -> None:
        """What the operators of a run read and wrote to outside of it."""
        known, own = self.known, {id(tensor) for tensor in self._tree.tensors}
        small = {id(self._tree.tensors[index]) for index in self._tree.small}
        for entry in flow.written.values():
            storage, key = storage_at(entry.weak.cdata), _key_of(entry.tensor(), entry.weak)
            if storage is None:
                continue
            with disable_current_modes():
                view = byte_view(storage)
                if same_bytes(view, entry.before):
                    continue
            self._copies[key] = (view, entry.before)
            if key in small:
                known.moving.add(key)
            else:
                known.written.append((entry.weak, entry.tensor))
        seen = {id(weak()) for weak in known.read} | own
        for weak in flow.read.values():
            other = weak()
            # What is no leaf, or has no name of its own, is another one in the next step.
            if other is not None and id(other) not in seen and other.is_leaf and not other.is_inference():
                known.read.append(weak)

    @contextlib.contextmanager
    def replayed(self, raise_plain: Callable[[], None]) -> Iterator[None]:
        """Inside, all is as it was before the first run. `raise_plain` raises the error that plain autograd has for a
        tensor that it saved, if there is one. Raises RuntimeError for what was written in place since."""
        versions, modes = self._refuse_written(raise_plain), Modes()
        # A forward that differentiates runs again before it is over, and nothing has been learned of it.
        moved = self._moved_by_now()
        generators = [*host_generators()] if self.watch.has_drawn.is_set() else []
        try:
            if not moved and self._is_as_it_was(modes):
                try:
                    yield
                finally:
                    self._tree.put_if_moved()
                    modes.set_if_moved()
            else:
                with contextlib.ExitStack() as undo:
                    self._put_back(undo, modes, moved)
                    yield
        finally:
            _restore(generators)
            self._settle_down(versions)

    def _is_as_it_was(self, modes: Modes) -> bool:
        """Whether there is nothing to put back before the second run."""
        return (
            not (self._records or self._given or self._copies or self._parameters)
            and self._modes.is_still(modes)
            and self._tree.is_still()
            and _flags_of(self._tree.tensors) == self._flags
        )

    def _put_back(self, undo: contextlib.ExitStack, modes: Modes, moved: list[Any]) -> None:
        """Have all as it was before the first run, until `undo` is left. `modes`: those of now; `moved`: records beside
        those that were known."""
        self._modes.put_back(undo, modes)
        self._tree.put_back(undo)
        if self._parameters:
            undo.enter_context(_lent(self._parameters))
        records = (*self._records, *self._given, *moved)
        if records:
            undo.callback(_restore, [record.again() for record in records])
            _restore(records)
        for tensor, flag in zip(self._tree.tensors, self._flags, strict=True):
            if tensor.requires_grad != flag and tensor.is_leaf:
                tensor.requires_grad_(flag)
                undo.callback(tensor.requires_grad_, not flag)
        for view, then in self._copies.values():
            undo.enter_context(_written_back(view, then))

    def _refuse_written(self, raise_plain: Callable[[], None]) -> list[int]:
        """Raises for what was written in place since the first run. Returns the versions of now."""
        now = self._marks.again()
        for tensor in self._marks.moved(now):
            if id(tensor) in self._copies:
                continue
            raise_plain()
            path = ".".join(filter(None, (self.watch.path(), self.watch.name_of(tensor))))
            then, version = (marks.by_tensor()[id(tensor)][0] for marks in (self._marks, now))
            how = f"is at version {version}, was at {then}" if version != then else "its data was exchanged"
            raise self.watch.refusal_of(
                f"lowtide: the {_kind(tensor)} '{path}' was written to between the forward pass of the recomputed "
                f"{self.watch} and its backward ({how}). Run again, it would give other gradients. Write to it after "
                "the backward pass (an optimizer's step, a copy_), or give this module the fate keep or swap."
            )
        return now.values[: len(now.tensors)]

    def _settle_down(self, versions: list[int]) -> None:
        """No version tells of what the second run wrote, since it was put back."""
        if self._marks.versions() == versions:
            return
        for tensor, version in zip(self._marks.tensors, versions, strict=True):
            if version_of(tensor) == version:
                continue
            if id(tensor) not in self._copies:
                raise self.watch.refusal_of(
                    f"lowtide: the recomputed {self.watch} wrote to its {_kind(tensor)} '{self.watch.name_of(tensor)}' "
                    "when it was run again for its backward pass, and not in its forward. Give it the fate keep or "
                    "swap."
                )
            set_versions((tensor,), (version,))


def _without_modules(records: list[Record]) -> list[Record]:
    """Those that a `Tree` has not: no attributes, tables and hooks of a module."""
    return [
        record
        for record in records
        if not isinstance(record, Attributes)
        or not (record.is_module or (not record.name.is_item and record.name.key in _OF_MODULES))
    ]


def _held(variable: contextvars.ContextVar) -> Held:
    def get() -> Any:
        try:
            return variable.get()
        except LookupError:
            return NOTHING

    def put(value: Any) -> None:
        if value is not NOTHING:
            variable.set(value)

    return Held(get, put, Name(None, variable.name))


def _key_of(tensor: torch.Tensor | None, weak: StorageWeakRef) -> int:
    """Of a tensor that was written to, or of its storage, if only an alias of it was seen."""
    return -weak.cdata if tensor is None else id(tensor)


def _restore(records: Any) -> None:
    for record in records:
        record.restore()


def _flags_of(tensors: list[torch.Tensor]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]


def _kind(tensor: torch.Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "tensor"


@contextlib.contextmanager
def _written_back(view: torch.Tensor, then: torch.Tensor) -> Iterator[None]:
    """Inside, a storage holds the bytes of `then`; what is written to it is forgotten."""
    with disable_current_modes(), torch.no_grad():
        now = view.clone()
        view.copy_(then)
    try:
        yield
    finally:
        with disable_current_modes(), torch.no_grad():
            view.copy_(now)


def _lent_parameters(module: nn.Module) -> list[Lent]:
    """The tensors that play the parameters of a module of an FSDP2 model: it gathers them, and gives them back."""
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in own_parameters(owner).items()
        if parameter is not None
    ]


@contextlib.contextmanager
def _lent(then: list[Lent]) -> Iterator[None]:
    """Inside, the parameters are the tensors of the first run."""
    lent = [entry for entry in then if own_parameters(entry[0]).get(entry[1]) is not entry[2]]
    # A sharded parameter is gathered, and given back, by its owner, not by us.
    lent = [entry for entry in lent if not _is_emptied(inside(entry[2])) and not _is_gathered_now(*entry)]
    current = [(owner, name, own_parameters(owner)[name]) for owner, name, _ in lent]
    for owner, name, parameter in lent:
        own_parameters(owner)[name] = parameter
    try:
        yield
    finally:
        for owner, name, now in current:
            own_parameters(owner)[name] = now


def _is_emptied(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not tensor.untyped_storage().nbytes()


def _is_gathered_now(owner: nn.Module, name: str, then: torch.Tensor) -> bool:
    now = own_parameters(owner)[name]
    return now is not None and is_gathered_of(now, then)
