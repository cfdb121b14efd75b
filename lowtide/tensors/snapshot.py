"""State that is set aside and restored: everything that a forward pass can reach from its modules and change.

What: `take(module, ...)` walks from modules (and from `beside`: a batch) through their attributes and remembers what
it finds; `restore()` puts it back. Remembered are: attributes and which
there are; what is in lists, dictionaries, sets and deques (subclasses too) and in objects of other classes, however
deep, also behind bound methods, `partial`s and the closures of hooks; random generators of torch, numpy and Python,
reachable or process-wide; tensors that are buffers, attributes or parts of either: which they are, what is in them,
their version, `requires_grad` and hooks; numpy arrays. Shared objects are found once and stay the same objects.

With `code`, also what the forward and the hooks *name*: globals of their functions (numbers, containers, generators)
and attributes of the modules' classes. With `called` (the observed step), also what the functions and methods name that
they call, attributes of the modules and classes that they name, modules that are global; thread-locals, values of
context variables, weak containers, namespaces, bytes that can be written, arrays of objects, files that are read,
distributions of torch, members of enumerations, functions with a cache, global module hooks, active modes, and objects
with a lock. What moves on by itself and cannot be wound back (an iterator, a generator, a file that is written) is not
put back, but `moved` tells its name.

Bytes: tensors up to 1 MiB are copied. Larger ones, and parameters, are not, unless `about_to_write` is called before
they are written (the observer does, it sees each operator), or `steady` is given: then a large one is copied to the
host until it has come through once without a change, and trusted to its version from then on.

Cost: about 20 us a module with its parameters (0.5 ms a Llama layer; asking or putting back 0.2 ms), 6 us a small
tensor beside; 0.1 ms for the process's random states.
Not covered: what has no Python state to read (sockets, extension objects); objects of torch that are neither modules
nor distributions; objects that a thread of their own may be writing to (queues, pools); arrays above 16 MiB; more than
50,000 objects beyond the attributes of modules (`is_whole` says so).
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import io
import mmap
import random
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.tensors.kinds import CACHE_NAMES, num_cached, swapped_weights_of
from lowtide.tensors.private import (
    INTERNAL_MODES,
    disable_current_modes,
    dispatch_modes,
    function_modes,
    global_module_hooks,
    is_compiled_function,
    original_of_compiled,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from lowtide.tensors.remembered import (
    NOTHING,
    PLAIN,
    TRANSPARENT,
    Attributes,
    Held,
    Items,
    Name,
    Record,
    State,
    TensorState,
    is_filled,
    is_read,
    members_of,
    position_of,
    record_of_empty,
    slots_of,
)
from lowtide.tensors.view import byte_view

_MAX_ARRAY_BYTES = 2**24
_MAX_OBJECTS = 50_000
# Classes of these packages hold no state of a forward pass, or such as only they may touch.
_FOREIGN = frozenset(
    {"torch", "torchgen", "functorch", "lowtide", "threading", "_thread", "multiprocessing", "concurrent", "asyncio"}
    | {"logging", "io", "_io", "weakref", "_weakref", "abc", "functools", "types", "typing", "builtins", "inspect"}
    | {"importlib", "contextlib", "enum", "re", "itertools"}
)
# Parts of those packages whose objects people keep as state of their own.
_FAMILIAR = (
    "torch.distributions.",
    "torch.nn.",
    "torch.utils.weak",
    "torch.utils.flop_counter",
    "torch.ao.",
    "weakref",
)
_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque})
_CACHED = type(functools.lru_cache(len))
_WRITABLE: tuple[Any, ...] = (
    bytearray,
    array,
    memoryview,
    mmap.mmap,
    ctypes.Array,
    ctypes.Structure,
    type(ctypes.c_int()).__base__,
)
_VISITS: tuple[tuple[Any, str, bool], ...] = (
    (_WRITABLE, "_writable", False),
    (weakref.ref, "_weak_reference", True),
    (contextvars.ContextVar, "_context_variable", True),
    (types.BuiltinFunctionType, "_builtin", True),
    ((types.SimpleNamespace, threading.local), "_object", False),
    (io.IOBase, "_file", True),
    (_CACHED, "_cached", True),
    (nn.Module, "_module", False),
    (torch.Tensor, "_tensor", False),
    ((torch.Generator, random.Random), "_generator", False),
    (dict, "_dict", False),
    ((list, deque, set), "_items", False),
    (tuple, "_tuple", False),
    (types.FunctionType, "_function", False),
    (types.MethodType, "_method", False),
    (functools.partial, "_partial", False),
    ((type, BaseException), "", False),
)
"""How to look at an object of some class (empty: not at all), and whether only the observed step does."""
_MODULE_DEPTH = 2
_LOCKS = ("lock", "RLock", "Condition", "Thread", "Event", "Semaphore", "BoundedSemaphore", "SimpleQueue")
# Beside these, another thread is at work.
_WORKERS = ("Condition", "Thread", "SimpleQueue", "ThreadPoolExecutor", "ProcessPoolExecutor")
_DESCRIPTORS = types.MemberDescriptorType | types.GetSetDescriptorType | types.WrapperDescriptorType
_RUN = frozenset({"forward", "backward", "setup_context", "vjp", "jvp"})
"""Methods that run without being named in the code that was walked; and those with two underscores."""


class Snapshot:
    """What was found, as it was. Made by `take`."""

    def __init__(self, walk: _StateWalk, steady: WeakTensorKeyDictionary | None) -> None:
        self._records = walk.records
        self._empty = walk.empty
        self._positions = walk.positions
        self._tensors = walk.tensors
        self._steady = steady
        self._written: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self.is_whole = walk.is_whole
        """False if there was more than could be walked through."""

    @property
    def iterator(self) -> str:
        """The name of the first iterator in attributes or dictionaries; empty if there is none."""
        for record in self._records:
            if isinstance(record, Attributes):
                for key, value in record.then.items():
                    if is_iterator(value):
                        return str(Name(record.name, key, record.is_item))
        return ""

    def records(self) -> list[Record]:
        """What holds others or a state: attributes, items, generators, arrays (remembered.py)."""
        return [*self._records, *(record_of_empty(*each) for each in self._empty)]

    def changed(self) -> list[Record]:
        """Those that are not as they were."""
        filled = [record_of_empty(*each) for each in self._empty if each[0]]
        return [record for record in self._records if not record.is_same()] + filled

    @property
    def tensors(self) -> list[tuple[torch.Tensor, Name]]:
        """The tensors that were found, and where."""
        return [(state.tensor, state.name) for state in self._tensors]

    def about_to_write(self, storage: torch.UntypedStorage) -> None:
        """Somebody is going to write to bytes that were there when the snapshot was taken: keep them, on the host."""
        if storage_key(storage) not in self._written and storage.nbytes():
            with disable_current_modes(), torch.no_grad():
                self._written[storage_key(storage)] = (storage, byte_view(storage).to("cpu", copy=True))

    def lost(self, *, but: Collection[int] = ()) -> list[str]:
        """Names of tensors that were written to and that no copy was made of; `restore` leaves those as they are.

        `but`: identities of tensors that may have been.
        """
        return [
            str(state.name) for state in self._tensors if id(state.tensor) not in but and state.is_lost(self._written)
        ]

    def exchange(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `other(tensor)` in the place of each tensor that was found, until `restore`. Not in sets."""

        def put(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return other(value)
            is_tuple = isinstance(value, tuple) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
            return tree_map_only(torch.Tensor, other, value) if is_tuple else value

        for record in self._records:
            pairs: Iterable[tuple[Any, Any]]
            write: Callable[[Any, Any], Any]
            if isinstance(record, Attributes):
                pairs, write = record.then.items(), functools.partial(record.kind.__setitem__, record.value)
            elif isinstance(record, Items) and not isinstance(record.then, set):
                pairs, write = enumerate(record.then), record.value.__setitem__
            elif type(record) is Held:
                pairs, write = [(record, record.then)], _put
            else:
                continue
            for key, value in pairs:
                if isinstance(value, torch.Tensor | tuple) and (now := put(value)) is not value:
                    write(key, now)

    def moved(self) -> list[str]:
        """Names of what has moved on since, and cannot be wound back."""
        return [
            f"'{name}' ({type(value).__module__}.{type(value).__qualname__})"
            for value, name, then in self._positions
            if position_of(value) != then
        ]

    def note_positions(self) -> None:
        """Compare what moves on by itself (iterators, say) with where it stands now."""
        self._positions = [(value, name, position_of(value)) for value, name, _ in self._positions]

    def written(self, *, by_value: bool) -> Iterator[str]:
        """Names of tensors that were written to since. `by_value`: small ones also past their version."""
        return (str(state.name) for state in self._tensors if state.is_written(by_value=by_value))

    def restore(self) -> None:
        """Put everything back. May be called again. What did not change is not written to."""
        with disable_current_modes(), torch.no_grad():
            for storage, copy in self._written.values():
                now = byte_view(storage)
                if now.numel() == copy.numel():
                    now.copy_(copy)
            for container, _, _ in self._empty:
                if container:
                    container.clear()
            for record in self._records:
                record.restore()
            for tensor in self._tensors:
                tensor.restore(self._written)

    def forget_tensors(self) -> None:
        """Let go of the copies of tensors, which are not put back then."""
        self._tensors = []

    def note_steady(self) -> None:
        """All went well: large tensors that did not change are trusted to their version from now on."""
        assert self._steady is not None
        for tensor in self._tensors:
            tensor.note_steady(self._steady)


def take(
    *modules: nn.Module,
    beside: Any = None,
    code: bool = False,
    called: bool = False,
    process: bool = True,
    steady: WeakTensorKeyDictionary | None = None,
    devices: Iterable[torch.device] = (),
) -> Snapshot:
    """Remember what `modules` and `beside` reach. `code`: with what their functions name; `called`: and the functions
    that these call. `process`: the random states of the process and of `devices` too."""
    walk = _StateWalk(code or called, called, steady)
    modes = [*function_modes(), *dispatch_modes()] if called else []
    with disable_current_modes():
        if process:
            walk.records += process_states(devices)
        for module in modules:
            walk.add(module, Name(None, ""), 0)
        if beside is not None:
            walk.add(beside, Name(None, "batch"), 0)
        if called:
            walk.add_surroundings(modes)
        walk.run()
        for weights in filter(None, map(swapped_weights_of, modules)):
            for state in filter(lambda state: weights.moves(state.tensor), walk.tensors):
                state.let_go()
    return Snapshot(walk, steady)


def why_not_rerun(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Why this call of `module` could not be repeated, in words; empty where nothing speaks against it."""
    caches = {name: kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None}
    try:
        holds_tokens = any(num_cached(module, cache) for cache in caches.values())
    except Exception:  # somebody else's class, asked in somebody else's forward
        return f"nobody can say how many tokens its {next(iter(caches))} holds"
    if holds_tokens:
        return f"its {next(iter(caches))} already holds tokens"
    leaves = tree_leaves((args, {key: value for key, value in kwargs.items() if key not in caches}))
    beside = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN]
    iterator = take(module, beside=beside or None, code=True, process=False).iterator
    return f"it can reach an iterator, '{iterator}', which cannot be wound back" if iterator else ""


class _StateWalk:
    """One way through everything that can be reached, each object once, near ones first."""

    def __init__(self, code: bool, called: bool, steady: WeakTensorKeyDictionary | None) -> None:
        self.records: list[Record] = []
        self.empty: list[tuple[Any, Name, str]] = []
        """Containers in attributes that have nothing in them, as most hooks of most modules: each with the name of what
        has it, and the attribute's."""
        self.positions: list[tuple[Any, Name, Any]] = []
        """What moves on by itself, and where it stood."""
        self.tensors: list[TensorState] = []
        self._code = code
        self._called = called
        self._plain = PLAIN - {types.BuiltinFunctionType} if called else PLAIN
        self._names: set[str] = set(_RUN)
        """That the code that was walked names."""
        self._methods: dict[str, list[tuple[Any, Name]]] = {}
        """Of classes that were found, by their names; walked once somebody names them."""
        self._steady = steady
        self._seen: dict[int, Any] = {}
        self._noted: set[Any] = set()
        """Classes that were found, and globals: the namespace's identity, and the name."""
        self._todo: deque[tuple[Any, Name, int]] = deque()
        self._num_far = 0
        self._visits: dict[type, Callable[[Any, Name, int], None] | None] = {}

    @property
    def is_whole(self) -> bool:
        """Whether there was no more than could be walked through."""
        return self._num_far <= _MAX_OBJECTS

    def add(self, value: Any, name: Name, depth: int) -> None:
        kind = type(value)
        if kind in self._plain or id(value) in self._seen:
            return
        visit = self._visits.get(kind, self)
        if visit is self:
            visit = self._visits[kind] = self._visit_for(kind)
        if visit is None:
            return
        if depth > _MODULE_DEPTH:
            self._num_far += 1
            if not self.is_whole:
                return
        self._seen[id(value)] = value
        self._todo.append((value, name, depth))

    def add_surroundings(self, modes: list[Any]) -> None:
        """What is found around a forward: values of context variables, hooks of all modules, modes."""
        for variable, value in contextvars.copy_context().items():
            self.add(value, Name(None, variable.name), 1)
        for hooks in global_module_hooks():
            self.add(hooks, Name(None, "global module hooks"), 1)
        for mode in modes:
            if not type(mode).__module__.startswith(("lowtide.", *INTERNAL_MODES)):
                self.add(vars(mode), Name(None, type(mode).__name__), 1)
                self._class(type(mode), Name(None, type(mode).__name__))

    def run(self) -> None:
        todo, visits = self._todo, self._visits
        while todo or self._find_methods():
            value, name, depth = todo.popleft()
            visit = visits[type(value)]
            assert visit is not None
            visit(value, name, depth)
        # Bound methods of its own: a cycle, in which the batch would outlive the step.
        visits.clear()

    def _find_methods(self) -> bool:
        """Walk methods that code names which was walked since; False where there is none."""
        for key in self._methods.keys() & self._names:
            for function, name in self._methods.pop(key):
                self.add(function, name, 1)
        return bool(self._todo)

    def _visit_for(self, kind: type) -> Callable[[Any, Name, int], None] | None:
        for classes, visit, is_far in _VISITS:
            if (self._called or not is_far) and issubclass(kind, classes):
                return getattr(self, visit) if visit else None
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if issubclass(kind, numpy.ndarray):
                return self._array
            if issubclass(kind, numpy.random.Generator):
                return lambda value, name, depth: self.add(value.bit_generator, name, depth)
            if issubclass(kind, numpy.random.BitGenerator | numpy.random.RandomState):
                return self._generator
        if self._called and issubclass(kind, Iterator):
            if kind.__dictoffset__ == 0 or is_library(kind.__module__):
                return self._iterator
        elif issubclass(kind, Enum | torch.optim.Optimizer) and not self._called:
            return None
        is_familiar = self._called and f"{kind.__module__}.".startswith(_FAMILIAR)
        if (kind.__module__.partition(".")[0] in _FOREIGN and not is_familiar) or not _has_attributes(kind):
            return None
        return self._object

    # -- what holds others -----------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, name: Name, depth: int) -> None:
        self._attributes(vars(module), name, 0, is_module=True)
        if self._code:
            self._class(type(module), name)

    def _attributes(self, attributes: dict[str, Any], name: Name, depth: int, is_module: bool = False) -> None:
        then, empty = attributes.copy(), self.empty
        self.records.append(Attributes(attributes, then, name, is_module=is_module, is_item=False))
        for key, child in then.items():
            kind = type(child)
            if kind in self._plain:
                continue
            if kind in _CONTAINERS and not child:
                empty.append((child, name, key))
            else:
                self.add(child, Name(name, key), depth + 1)

    def _dict(self, value: dict, name: Name, depth: int) -> None:
        is_named = name.key in TRANSPARENT and not name.is_item
        then = dict(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))
        self.records.append(Attributes(value, then, name, is_module=False, is_item=not is_named))
        for key, child in then.items():
            if type(child) not in self._plain:
                self.add(child, Name(name, key, not is_named), depth + 1)
        self._own(value, name, depth)

    def _items(self, value: Any, name: Name, depth: int) -> None:
        is_set = isinstance(value, set)
        then = set(value) if is_set else list(value)
        self.records.append(Items(value, then, name))
        for index, child in enumerate(then):
            if type(child) not in self._plain:
                self.add(child, name if is_set else Name(name, index, True), depth + 1)
        self._own(value, name, depth)

    def _own(self, value: Any, name: Name, depth: int) -> None:
        """The attributes of an instance of a container's subclass."""
        attributes = None if type(value) in _CONTAINERS else getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._attributes(attributes, name, depth)

    def _tuple(self, value: tuple, name: Name, depth: int) -> None:
        for index, child in enumerate(value):
            self.add(child, Name(name, index, True), depth + 1)

    def _object(self, value: Any, name: Name, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        slots = slots_of(value)
        children = [*(attributes.values() if type(attributes) is dict else ()), *slots.values()]
        if any(type(child).__name__ in (_WORKERS if self._called else _LOCKS) for child in children):
            return
        if type(attributes) is dict:
            self._attributes(attributes, name, depth)
        if isinstance(value, threading.local):
            self.records.append(State.of_thread(value, name))
        if self._called:
            self._class(type(value), name)
        for key, slot in members_of(type(value)).items():
            self.records.append(Held.of_slot(value, key, slot, Name(name, key)))
            self.add(slots.get(key), Name(name, key), depth + 1)

    def _function(self, function: types.FunctionType, name: Name, depth: int) -> None:
        if is_compiled_function(function):
            self.add(original_of_compiled(function), name, depth)  # the rest is the compiler's
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen and is_filled(cell):
                self._seen[id(cell)] = cell
                self.records.append(Held.of_cell(cell, Name(name, key)))
                self.add(cell.cell_contents, Name(name, key), depth + 1)
        if function.__dict__:
            self._attributes(function.__dict__, name, depth)
        for child in (function.__defaults__ or ()) + tuple((function.__kwdefaults__ or {}).values()):
            self.add(child, name, depth + 1)
        if self._code and not is_library(function.__module__):
            names = names_in(function.__code__)
            self._names |= names
            self._named_in(function.__globals__, names, Name(None, function.__module__), depth, set())

    def _named_in(self, namespace: dict[str, Any], names: set[str], within: Name, depth: int, seen: set[int]) -> None:
        """What of a module's globals a function names; in an observed step also what it names of those modules that it
        names, and functions and classes."""
        seen.add(id(namespace))
        if self._called:
            self.records.append(State.of_new_globals(namespace, names, within))
        for key in names:
            value = namespace.get(key, NOTHING)
            if value is NOTHING:
                value = sys.modules.get(key)  # imported inside of the function
                if not isinstance(value, types.ModuleType):
                    continue
            if isinstance(value, type | types.ModuleType | types.FunctionType | nn.Module) and not self._called:
                continue
            name = Name(within, key)
            if isinstance(value, types.ModuleType):
                if id(vars(value)) not in seen and not is_library(value.__name__):
                    self._named_in(vars(value), names, Name(None, value.__name__), depth, seen)
            elif isinstance(value, type):
                if not issubclass(value, BaseException):
                    self._class(value, name)
                    for owner in value.__mro__:
                        self.add(vars(owner).get("__init__"), name, depth + 1)
            else:
                if (id(namespace), key) not in self._noted:
                    self._noted.add((id(namespace), key))
                    self.records.append(Held.of_globals(namespace, key, name))
                self.add(value, name, depth + 1)

    def _class(self, kind: type, name: Name) -> None:
        """Attributes of a module's class, and what its `forward` names; in an observed step, what its methods name."""
        for owner in kind.__mro__:
            if owner in self._noted or is_library(owner.__module__):
                continue
            self._noted.add(owner)
            within = Name(None, owner.__name__)
            if self._called:
                self.records.append(State.of_new_attributes(owner, within))
            for key, value in vars(owner).items():
                functions = _functions_of(value)
                for function in functions:
                    self._class_function(function, key, Name(within, key))
                is_callable = isinstance(value, type) if self._called else callable(value)
                if not (key.startswith("__") or functions or is_callable or isinstance(value, _DESCRIPTORS)):
                    self.records.append(Held.of_class(owner, key, Name(within, key)))
                    self.add(value, Name(within, key), 1)

    def _class_function(self, function: types.FunctionType, key: str, name: Name) -> None:
        if key == "forward" and not self._called:
            self.add(function, name, 1)
        elif self._called and not key.startswith("__"):
            self._methods.setdefault(key, []).append((function, name))
        elif self._called and key != "__init__":  # which has run, unless code names the class
            self.add(function, name, 1)

    def _method(self, method: types.MethodType, name: Name, depth: int) -> None:
        self.add(method.__self__, name, depth + 1)
        self.add(method.__func__, name, depth + 1)

    def _partial(self, partial: functools.partial, name: Name, depth: int) -> None:
        for child in (partial.func, partial.args, partial.keywords):
            self.add(child, name, depth + 1)

    def _weak_reference(self, reference: weakref.ref, name: Name, depth: int) -> None:
        self.add(reference(), name, depth)

    def _context_variable(self, variable: contextvars.ContextVar, name: Name, depth: int) -> None:
        self.add(variable.get(None), name, depth)

    def _builtin(self, function: Any, name: Name, depth: int) -> None:
        """The method of a container."""
        if not isinstance(function.__self__, types.ModuleType):
            self.add(function.__self__, name, depth)

    # -- what holds values -----------------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor, name: Name, depth: int) -> None:
        self.tensors.append(TensorState(tensor, name, self._steady))
        attributes = getattr(tensor, "__dict__", None)
        if attributes is not None:  # what a forward adds must go too
            self._attributes(attributes, name, depth)

    def _generator(self, generator: Any, name: Name, depth: int) -> None:
        if not isinstance(generator, random.SystemRandom):
            self.records.append(State.of_generator(generator, name))

    def _writable(self, value: Any, name: Name, depth: int) -> None:
        with memoryview(value) as view:
            is_copied = not view.readonly and view.nbytes <= _MAX_ARRAY_BYTES
        if is_copied:
            self.records.append(State.of_bytes(value, name))

    def _file(self, file: io.IOBase, name: Name, depth: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # of one that is closed, or tells no position
            if is_read(file):
                self.records.append(State.of_file(file, name))
            else:
                file.tell()
                self._iterator(file, name, depth)

    def _cached(self, function: Any, name: Name, depth: int) -> None:
        self.records.append(State.of_cache(function, name))
        self.add(function.__wrapped__, name, depth)

    def _iterator(self, value: Any, name: Name, depth: int) -> None:
        self.positions.append((value, name, position_of(value)))

    def _array(self, array: Any, name: Name, depth: int) -> None:
        if self._called and array.dtype == object:
            self.records.append(State.of_array(array, name))
            for index, child in enumerate(array.flat):
                self.add(child, Name(name, index, True), depth + 1)
            return
        if array.flags.writeable and array.nbytes <= _MAX_ARRAY_BYTES and not array.dtype.hasobject:
            self.records.append(State.of_array(array, name))


def process_states(devices: Iterable[torch.device]) -> Iterator[State]:
    """Random generators of torch (host and devices), Python, and numpy if it is in use."""
    yield State(torch.get_rng_state, torch.set_rng_state, Name(None, "torch's random state"))
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            yield State(
                functools.partial(module.get_rng_state, device),
                functools.partial(module.set_rng_state, device=device),
                Name(None, f"the random state of {device}"),
            )
    yield from host_generators()


def host_generators() -> Iterator[State]:
    """Random generators of the process that are not torch's: Python's, and numpy's if it is in use."""
    yield State.of_generator(random, Name(None, "Python's random state"))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield State.of_generator(numpy.random, Name(None, "numpy's random state"))


def _put(record: Any, value: Any) -> None:
    record.put(value)


def _has_attributes(kind: type) -> bool:
    return kind.__dictoffset__ != 0 or any(vars(owner).get("__slots__") for owner in kind.__mro__)


def is_iterator(value: Any) -> bool:
    """Whether it moves on by itself; where a file stands can be read."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _functions_of(value: Any) -> list[types.FunctionType]:
    """The functions of what is found in a class."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if isinstance(each, types.FunctionType)]
    wrapped = getattr(value, "func", None) if isinstance(value, functools.cached_property) else value
    return [wrapped] if isinstance(wrapped, types.FunctionType) else []


def names_in(code: types.CodeType) -> set[str]:
    """Globals and attributes that a function names, with those of the functions and comprehensions inside of it.

    Short strings are names too: `setattr(module, "count", 1)`.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return names


def is_library(module: str | None) -> bool:
    """Whether code of this module is Python's, numpy's, torch's or lowtide's: nothing of a forward's state is in it."""
    package = (module or "").partition(".")[0]
    return package in _FOREIGN or package in sys.stdlib_module_names or package == "numpy"
