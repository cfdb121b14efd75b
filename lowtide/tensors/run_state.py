"""What a second run of a module must find as the first run found it: everything that it reads beside its inputs.

What: a `RunState` is taken before a module runs for the first time, and entered when it runs again. Inside, the
attributes of the module and of all that it reaches are what they were: numbers, lists, dictionaries, objects, hooks,
the `training` flag, parameters and tensors that were replaced since, `requires_grad` flags, buffers that the first run
wrote to, random generators, Python's and numpy's random state. Afterwards they are what they were before the second
run. (How all that is found: tensors/snapshot.py.)

What cannot be put back is refused: a parameter, buffer or tensor that was written in place since, or whose `.data` was
exchanged. There is no copy of it. Plain autograd does the same for tensors that it saved, and in that case the error
has its words.

A module is walked through once (`Watch`). From then on a run compares what was found, object by object, and walks
again only if something is another object.

Cost, for a decoder layer with 13 modules while nothing moves: about 70 us in the forward and 150 us in its second run
where nothing else runs, and up to three times that in a step, whose operators take the caches. Where the module's own
forward moves attributes, 0.5 ms more in each. A clone of each buffer up to 64 KiB, dropped again if the run did not
change it.
Not covered: writes through `.data`, which no version shows; state behind functions that the forward calls; files and
what else has no state to read (an iterator is refused); objects of more than one thread. Torch's own random state is
restored by torch's checkpoint, and for single modules by `RandomState`.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import call as _call
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.errors import RecomputeRefusedError
from lowtide.tensors.fsdp import fsdp_modules, is_gathered_of
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.modes import Modes
from lowtide.tensors.private import (
    COMPILED_CALL,
    FORWARD_HOOK_FLAGS,
    FORWARD_HOOKS,
    MODULE_TABLES,
    current_graph_task_id,
    disable_current_modes,
    has_forward_hooks,
    own_parameters,
    set_versions,
    version_of,
)
from lowtide.tensors.remembered import Array, Attributes, Empty, Items, State
from lowtide.tensors.second_run import reached_iterator
from lowtide.tensors.snapshot import take
from lowtide.tensors.view import same_bytes, write
from lowtide.tensors.wrappers import inside

_SMALL_BYTES = 2**16
_ORDINARY = frozenset({dict, OrderedDict})
# What every module has, and no forward depends on; hooks are looked at by themselves.
_OF_NO_MATTER = frozenset({*vars(nn.Module()), COMPILED_CALL}) - {"training", *MODULE_TABLES}


class Found:
    """Everything that a module reaches, at one moment, arranged for a quick comparison."""

    __slots__ = (
        "_containers",
        "_dicts",
        "_empties",
        "_getters",
        "_hooks",
        "_lists",
        "_num_items",
        "_others",
        "_values",
        "draws",
        "is_light",
        "iterator",
        "large",
        "names",
        "small",
        "states",
        "tensors",
    )

    def __init__(self, module: nn.Module, beside: list[Any], *, has_shards: bool) -> None:
        snapshot = take(module, beside=beside or None, code=True, process=False)
        records = [record for record in snapshot.records if not _has_key(record, _OF_NO_MATTER)]
        if has_shards:
            records = [record for record in records if not _has_key(record, {MODULE_TABLES[0]})]
        self.states = [record for record in records if isinstance(record, State | Array)]
        self._containers = [record for record in records if not isinstance(record, State | Array)]
        dicts = [r for r in self._containers if isinstance(r, Attributes) and type(r.value) in _ORDINARY]
        lists = [r for r in self._containers if isinstance(r, Items) and isinstance(r.then, list)]
        quick = {id(record) for record in (*dicts, *lists)}
        self._others = [r for r in self._containers if id(r) not in quick and not isinstance(r, Empty)]
        for record in self._containers:
            if isinstance(record, Empty):
                record.found = [one for one in record.found if one[2] not in _OF_NO_MATTER]
        self._empties = [value for r in self._containers if isinstance(r, Empty) for value, _, _ in r.found]
        self._hooks = Hooks([record.then for record in dicts if record.is_module])
        self._dicts = [record.value for record in dicts]
        self._lists = [record.value for record in lists]
        self._num_items = [*(len(record.then) for record in dicts), *(len(record.then) for record in lists)]
        self._getters = [_getter(record) for record in dicts]
        values = chain.from_iterable(map(_call, self._getters, [record.then for record in dicts]))
        self._values = [*values, *(item for record in lists for item in record.then)]
        self.iterator = reached_iterator(dicts)
        self.draws = bool(beside) or not all(map(_is_torchs_own, module.modules()))
        # Inference tensors have no version, and nobody can write to them outside of inference mode.
        found = [(tensor, name) for tensor, name in snapshot.tensors if not tensor.is_inference()]
        if has_shards:
            found = [(tensor, name) for tensor, name in found if not isinstance(tensor, nn.Parameter)]
        self.tensors = [tensor for tensor, _ in found]
        self.names = [name for _, name in found]
        sizes = [_bytes_to_copy(tensor) for tensor in self.tensors]
        self.small = [index for index, size in enumerate(sizes) if 0 < size <= _SMALL_BYTES]
        self.large = [index for index, size in enumerate(sizes) if size > _SMALL_BYTES]
        # What lives as long as the module anyway, or is small: others must not be held until the next run.
        buffers = {id(buffer) for buffer in module.buffers()}
        self.is_light = not beside and all(
            tensor.grad_fn is None
            and (isinstance(tensor, nn.Parameter) or id(tensor) in buffers or _bytes_to_copy(tensor) <= _SMALL_BYTES)
            for tensor, _ in snapshot.tensors
        )

    def is_still(self) -> bool:
        """Whether all attributes, dictionaries and lists hold the very objects that they held."""
        if any(self._empties) or [*map(len, self._dicts), *map(len, self._lists)] != self._num_items:
            return False
        try:
            now = chain(self._items(), chain.from_iterable(self._lists))
            is_same = all(map(is_, now, self._values))
        except KeyError:
            return False
        return (
            is_same and self._hooks.is_still() and all(next(record.changed(), None) is None for record in self._others)
        )

    def _items(self) -> Iterator[Any]:
        return chain.from_iterable(map(_call, self._getters, self._dicts))

    def put_back(self) -> None:
        """All that holds others becomes what it was."""
        for record in self._containers:
            record.restore()
        self._hooks.restore()

    def lend(self) -> list[Any]:
        """The same. Returns what was there, to be restored."""
        before = [record.again() for record in (*self._containers, self._hooks)]
        self.put_back()
        return [one for record in before for one in (record if isinstance(record, list) else [record])]


class Hooks:
    """The forward hooks of modules, but for those of lowtide's own first forward, which come and go in any thread."""

    __slots__ = ("_flags", "_keys", "_modules", "_then", "_values")

    def __init__(self, modules: list[dict[str, Any]]) -> None:
        """`modules`: their attributes."""
        self._modules = modules
        self._values = [module[name] for module in modules for name in FORWARD_HOOKS]
        # Of hooks that want keyword arguments, or are called after an error too.
        self._flags = [
            (module[name], dict(module[name])) for module in modules for name in FORWARD_HOOK_FLAGS if module[name]
        ]
        self._then = [_foreign(hooks) for hooks in self._values]
        self._keys = [key for hooks in self._then for key in hooks]

    def is_still(self) -> bool:
        return [*chain.from_iterable(self._values)] == self._keys or all(
            [*_foreign(hooks)] == [*then] for hooks, then in zip(self._values, self._then, strict=True)
        )

    def again(self) -> Hooks:
        """The same hooks, as they are now."""
        return Hooks(self._modules)

    def restore(self) -> None:
        is_changed = False
        for hooks, then in zip(self._values, self._then, strict=True):
            now = _foreign(hooks)
            if [*now] != [*then]:
                for key in now:
                    del hooks[key]
                hooks.update(then)
                is_changed = True
        if is_changed:
            for flags, then_flags in self._flags:
                flags.update(then_flags)
            for module in self._modules:
                for name in FORWARD_HOOK_FLAGS:
                    for key in [
                        key for key in module[name] if not any(key in module[hooks] for hooks in FORWARD_HOOKS)
                    ]:
                        module[name].pop(key, None)


def _foreign(hooks: dict[int, Any]) -> dict[int, Any]:
    if not hooks:
        return {}
    return {
        key: hook for key, hook in [*hooks.items()] if not str(getattr(hook, "__module__", "")).startswith("lowtide.")
    }


def _getter(record: Attributes) -> Callable[[dict], tuple]:
    """What gives those values of a dictionary that a run may depend on."""
    keys = [key for key in record.then if not (record.is_module and key in _OF_NO_MATTER)]
    # With one key it would give the value alone, and without keys nothing.
    return itemgetter(*keys, keys[0], keys[0]) if keys else _nothing


def _nothing(_value: dict) -> tuple:
    return ()


def _has_key(record: Any, keys: Collection[str]) -> bool:
    return isinstance(record, Attributes) and not record.name.is_item and record.name.key in keys


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether it surely draws from torch's generators only."""
    own = vars(module).get("forward")
    return (
        type(module).__module__.startswith("torch.nn.")
        and not has_forward_hooks(module)
        and (own is None or type(own).__module__.startswith("lowtide."))
    )


def _bytes_to_copy(tensor: torch.Tensor) -> int:
    """Parameters are never copied; a module that writes to its own is refused."""
    return 0 if isinstance(tensor, nn.Parameter) or not is_plain(tensor) else tensor.numel() * tensor.element_size()


class Watch:
    """What one module reaches, from run to run."""

    __slots__ = ("_last", "_marks", "draws", "has_shards", "is_planned", "model", "module", "moving", "refusal")

    def __init__(self, module: nn.Module, model: nn.Module, draws: Draws, *, is_planned: bool = False) -> None:
        """`is_planned`: a solved plan runs it again, not a rule."""
        self.is_planned = is_planned
        self.refusal = ""
        """Why it could not be run again in some step, in words."""
        self.module = module
        self.model = model
        self.draws = draws
        self.has_shards = bool(fsdp_modules(model))
        self.moving: set[str] = set()
        """Tensors that are no parameters and that a run, or somebody between two runs, was seen to write to."""
        self._marks: dict[int, tuple[int, int]] = {}
        self._last: Found | None = None

    def now(self, beside: list[Any]) -> Found:
        """What the module and `beside` reach now; the same object as last time while nothing has moved."""
        last = self._last
        if last is not None and not beside and last.is_still():
            return last
        found = Found(self.module, beside, has_shards=self.has_shards)
        self._last = found if found.is_light else None
        return found

    def note_before(self, found: Found) -> None:
        """A run begins: what was written to since the last one ended moves by itself."""
        for index in (*found.small, *found.large):
            tensor = found.tensors[index]
            if self._marks.get(id(tensor), mark := _mark(tensor)) != mark:
                self.moving.add(str(found.names[index]))

    def note_after(self, found: Found) -> None:
        """A run is over."""
        self._marks = {id(found.tensors[i]): _mark(found.tensors[i]) for i in (*found.small, *found.large)}

    def refusal_of(self, message: str) -> RecomputeRefusedError:
        """The error that says why the module cannot be run again; noted for whoever plans."""
        self.refusal = message
        return RecomputeRefusedError(message, self.path(), can_stay=self.is_planned)

    def __str__(self) -> str:
        """The module in words: its path in the model, and its class."""
        path = self.path()
        return f"'{path}' ({type(self.module).__name__})" if path else type(self.module).__name__

    def path(self) -> str:
        return next((name for name, module in self.model.named_modules() if module is self.module), "")


class RunState:
    """A module's state before a run, for the second run."""

    __slots__ = (
        "_beside",
        "_copies",
        "_flags",
        "_found",
        "_is_first",
        "_marks",
        "_modes",
        "_parameters",
        "_random",
        "_states",
        "watch",
    )

    def __init__(self, watch: Watch, beside: list[Any], *, is_first: bool) -> None:
        """`beside`: arguments of the run that may hold state. `is_first`: copy large tensors too, since it is not
        known yet to which ones the module writes."""
        self.watch = watch
        self._is_first = is_first
        self._beside = beside
        self._found = found = watch.now(beside)
        self._marks = [_mark(tensor) for tensor in found.tensors]
        self._flags = [tensor.requires_grad for tensor in found.tensors]
        self._states = [record.again() for record in found.states]
        self._random = watch.draws.now() if found.draws else None
        self._modes = Modes()
        self._parameters = LentParameters(watch.module) if watch.has_shards else None
        copied = found.small
        if copied or found.large:
            watch.note_before(found)
            copied = copied + [i for i in found.large if is_first or str(found.names[i]) in watch.moving]
        self._copies: dict[int, torch.Tensor] = {}
        if copied:
            with disable_current_modes():
                self._copies = {index: found.tensors[index].detach().clone() for index in copied}

    def refuse_iterators(self) -> None:
        """Raise RuntimeError if there is something that cannot be wound back."""
        if self._found.iterator:
            raise self.watch.refusal_of(
                f"lowtide: the recomputed {self.watch} can reach an iterator, '{self._found.iterator}', and an "
                "iterator cannot be wound back to run the module again. Give it the fate keep or swap, or keep the "
                "position as a number."
            )

    def settle(self) -> None:
        """The first run is over: let go of the copies that are not needed. Raises RuntimeError if it wrote to a tensor
        of which there is no copy."""
        found = self._found
        for index, (tensor, mark) in enumerate(zip(found.tensors, self._marks, strict=True)):
            is_written = _mark(tensor) != mark
            copy = self._copies.get(index)
            if is_written and copy is None:
                raise self.watch.refusal_of(
                    f"lowtide: the recomputed {self.watch} wrote to its {_kind(tensor)} '{found.names[index]}' in its "
                    "own forward, and there is no copy of it to run it again from. Give it the fate keep or swap."
                )
            if copy is None:
                continue
            if not is_written and tensor.device.type == "cpu":
                with disable_current_modes():
                    is_written = not same_bytes(tensor, copy)
            is_small = index in found.small
            if is_written:
                self.watch.moving.add(str(found.names[index]))
            elif is_small and (self._is_first or tensor.device.type != "cpu"):
                continue  # to compare would wait for the device
            elif str(found.names[index]) not in self.watch.moving:
                del self._copies[index]
        if self._copies or found.large or found.small:
            self.watch.note_after(found)

    def can_go_back(self) -> bool:
        """Whether there is a copy of all that was written to since."""
        marks = enumerate(zip(self._found.tensors, self._marks, strict=True))
        return all(index in self._copies or _mark(tensor) == mark for index, (tensor, mark) in marks)

    def go_back(self) -> None:
        """Everything becomes what it was, for good."""
        self._found.put_back()
        _restore(self._states)
        if self._random is not None:
            self._random.set_from(self.watch.draws.now())
        for index, copy in self._copies.items():
            with disable_current_modes(), torch.no_grad():
                tensor = self._found.tensors[index]
                write(tensor.detach().data, copy)
                set_versions((tensor,), (self._marks[index][0],))

    @contextlib.contextmanager
    def replayed(self, raise_plain: Callable[[], None]) -> Iterator[None]:
        """Inside, all is as it was before the first run. `raise_plain` raises the error that plain autograd has for a
        tensor that it saved, if there is one. Raises RuntimeError for what was written in place since."""
        then = self._found
        now = self.watch.now(self._beside)
        self._refuse_written(raise_plain)
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._modes.again())
            if self._random is not None:
                undo.enter_context(self._random.again(self.watch.draws.now()))
            states = now.states if now is then else [*now.states, *then.states]
            undo.callback(_restore, [record.again() for record in states])
            undo.callback(_settle_down, now, [] if now is then else then.lend())
            if self._parameters is not None:
                undo.enter_context(self._parameters.replayed())
            _restore(self._states)
            for tensor, flag in zip(then.tensors, self._flags, strict=True):
                if tensor.requires_grad != flag and tensor.is_leaf:
                    tensor.requires_grad_(flag)
                    undo.callback(tensor.requires_grad_, not flag)
            for index, copy in self._copies.items():
                undo.enter_context(_written_back(then.tensors[index], copy))
            yield

    def _refuse_written(self, raise_plain: Callable[[], None]) -> None:
        found = self._found
        for index, (tensor, mark) in enumerate(zip(found.tensors, self._marks, strict=True)):
            now = _mark(tensor)
            if now == mark or index in self._copies:
                continue
            raise_plain()
            path = ".".join(filter(None, (self.watch.path(), str(found.names[index]))))
            how = f"is at version {now[0]}, was at {mark[0]}" if now[0] != mark[0] else "its data was exchanged"
            raise self.watch.refusal_of(
                f"lowtide: the {_kind(tensor)} '{path}' was written to between the forward pass of the recomputed "
                f"{self.watch} and its backward ({how}). Run again, it would give other gradients. Write to it after "
                "the backward pass (an optimizer's step, a copy_), or give this module the fate keep or swap."
            )


def _kind(tensor: torch.Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "tensor"


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when somebody writes to a tensor, or exchanges its data."""
    return version_of(tensor), tensor.data_ptr() if is_plain(tensor) else 0


def _restore(records: list[Any]) -> None:
    for record in records:
        record.restore()


def _settle_down(now: Found, before: list[Any]) -> None:
    """What a second run moved, and what was lent to it, is as it was before."""
    _restore(before)
    if not now.is_still():
        now.put_back()


@contextlib.contextmanager
def _written_back(tensor: torch.Tensor, then: torch.Tensor) -> Iterator[None]:
    """Inside, `tensor` holds the bytes of `then`; what is written to it is forgotten, and no version tells of it."""
    with disable_current_modes(), torch.no_grad():
        alias, version, now = tensor.detach(), version_of(tensor), tensor.detach().clone()
        write(alias.data, then)
    try:
        yield
    finally:
        with disable_current_modes(), torch.no_grad():
            write(alias.data, now)
            set_versions((tensor,), (version,))


class LentParameters:
    """The tensors that played the parameters of a module of an FSDP2 model: it gathers them, and gives them back."""

    __slots__ = ("_then",)

    def __init__(self, module: nn.Module) -> None:
        self._then = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in own_parameters(owner).items()
            if parameter is not None
        ]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the parameters are the tensors of the first run."""
        lent = [entry for entry in self._then if own_parameters(entry[0]).get(entry[1]) is not entry[2]]
        # A sharded parameter is gathered, and given back, by its owner, not by us.
        lent = [entry for entry in lent if not _is_emptied(inside(entry[2]))]
        lent = [(owner, name, then) for owner, name, then in lent if not _is_gathered_now(owner, name, then)]
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


class HostRandom:
    """Python's and numpy's random state, as they are now.

    numpy takes 40 us to tell its state. It is asked only if the bytes of its generator have moved since `last`, or if
    it holds half of a pair of normal numbers, which those bytes do not show.
    """

    __slots__ = ("_bytes", "_numpy", "_python")
    _numpy: Any

    def __init__(self, last: HostRandom | None) -> None:
        self._python = random.getstate()
        # One tuple of 625 numbers for all runs between two draws.
        if last is not None and _is_same_python(self._python, last._python):
            self._python = last._python
        self._bytes, self._numpy = b"", None
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._bytes = _bytes_of_numpy(numpy)
            is_last = last is not None and last._is_still(self._bytes)
            self._numpy = last._numpy if is_last else numpy.get_state(legacy=False)  # type: ignore[union-attr]

    @contextlib.contextmanager
    def again(self, now: HostRandom) -> Iterator[None]:
        """Inside, draws are those that followed; afterwards all is as it is `now`."""
        self.set_from(now)
        try:
            yield
        finally:
            # To set Python's is cheaper than to ask for it.
            random.setstate(now._python)
            numpy = sys.modules.get("numpy.random")
            has_drawn = numpy is not None and not self._is_still(_bytes_of_numpy(numpy))
            if numpy is not None and now._numpy is not None and (has_drawn or now._numpy is not self._numpy):
                numpy.set_state(now._numpy)

    def set_from(self, now: HostRandom) -> None:
        """Draws are from here on those that followed, while the state is `now`."""
        if now._python is not self._python:
            random.setstate(self._python)
        if now._numpy is not self._numpy and self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)

    def _is_still(self, state: bytes) -> bool:
        """Whether numpy, which was in this state a moment ago and has these bytes now, has surely drawn nothing."""
        return bool(state) and state == self._bytes and not self._numpy["has_gauss"]


class Draws:
    """Python's and numpy's random state, asked for again and again in one forward or one backward pass."""

    __slots__ = ("_last", "_task")

    def __init__(self) -> None:
        self._last: HostRandom | None = None
        self._task = -1

    def begin(self) -> None:
        """A forward begins: somebody may have set the state since."""
        self._last = None

    def now(self) -> HostRandom:
        task = current_graph_task_id()
        if task != self._task:
            self._last, self._task = None, task
        self._last = state = HostRandom(self._last)
        return state


def _is_same_python(now: Any, then: Any) -> bool:
    """The position, and the first and the last of 624 words, which all change together."""
    return bool(now[1][624] == then[1][624] and now[1][:3] == then[1][:3] and now[2] == then[2])


def _bytes_of_numpy(numpy: Any) -> bytes:
    generator = numpy.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


class RandomState:
    """Random generator states of the host and of the devices of some tensors, as they are now."""

    __slots__ = ("cpu", "device_type", "devices", "states")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.cpu = torch.get_rng_state()
        on_device = [t for t in tensors if t.device.type not in ("cpu", "meta")]
        self.device_type = on_device[0].device.type if on_device else None
        self.devices, self.states = get_device_states(*on_device) if on_device else ([], [])

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from these states inside, and leave the generators outside untouched."""
        with torch.random.fork_rng(devices=self.devices, device_type=self.device_type or "cuda"):
            self.set()
            yield

    def set(self) -> None:
        """Draw from these states from now on."""
        torch.set_rng_state(self.cpu)
        if self.device_type is not None:
            set_device_states(self.devices, self.states, device_type=self.device_type)


def autocast_state(device_type: str) -> Callable[[], contextlib.AbstractContextManager]:
    """A factory of contexts that re-enter autocast as it is now on `device_type`."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext
    is_enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    is_caching = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching)
