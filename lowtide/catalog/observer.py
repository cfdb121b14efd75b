"""The observed step: a dispatch mode, saved-tensor hooks and module hooks that write down who made, saved, read and
freed which storage.

What: `Observer` extends the runtime's recorder (same names, by construction) with one `graph.Call` for each operator,
one `graph.Storage` for each block of bytes with its birth and its death, and one `Node` for each storage that autograd
saves or that a module hook could catch. Saved activations are *parked*: their bytes go elsewhere at once and autograd
holds a ticket, so that a storage dies when everybody but autograd has let go of it, and is seen to come back when
backward reads it. All readers of a storage share the one copy that came back, and it goes when the last handle does:
exactly when plain autograd would have released it.

Why record lifetimes and not sample bytes: bytes alive at operator `i` are those of storages with born <= i < dies, so
every curve follows from the lifetimes, also that of a model whose equal layers ran only once (expand.py).

Cost: about 0.1 ms an operator. Not covered: storages that grow (`resize_`) count with their largest size; what backward
hooks of the user's hold.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowtide.catalog.activations import describe, is_plain_or_fake
from lowtide.catalog.clock import Clock
from lowtide.catalog.graph import Call, Storage, Value
from lowtide.catalog.live import plain_parts
from lowtide.catalog.operators import writes_unsaid
from lowtide.catalog.parking import Park
from lowtide.catalog.recorded import Node, Span, Trace
from lowtide.catalog.saving import Saves, is_parameter
from lowtide.catalog.sharded import is_fsdp
from lowtide.catalog.site import Anchor
from lowtide.catalog.trace import CASTS, Recorder, op_name
from lowtide.catalog.wrappers import inside, is_desugared

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_DETACH = torch.ops.aten.detach.default
OUTSIDE = "outside"
"""Path of what runs outside of the model's forward."""


class Observer(Recorder):
    """One step. Use: `with observer.following(model), observer: ...`, `observer.hooks()` around the forward."""

    def __init__(
        self, *, device: torch.device, clock: Clock, park: Park, layers: tuple[str, ...], holds_casts: bool = False
    ) -> None:
        super().__init__(set())
        # As autocast's cache would: it is off while this step runs, but on in those that follow.
        self._holds_casts = holds_casts
        self._held_casts: list[Any] = []
        self._is_autocast = False
        self.device = device
        self.storages: list[Storage] = []
        self.off_device: set[int] = set()
        self._clock = clock
        self.saves = Saves(self, park)
        self._layers = frozenset(layers)
        self._calls: list[Call] = []
        self._op_names: list[str] = []
        self._marks: list[Any] = []
        self._op_sequences: list[int] = []
        self._num_forward_ops: int | None = None
        self._live: dict[int, tuple[weakref.ref, Storage]] = {}
        self._gathered: list[_Gathered] = []
        self.named: dict[int, str] = {}
        self._caught: dict[int, Node] = {}
        self._is_silent = False
        self.is_inside = False
        self._num_roots = 0
        self._module_calls: dict[str, int] = {}
        self.skipped: frozenset[str] = frozenset()
        """Layers that only pass their input on; nothing is caught there."""
        self.failed_at = ""
        """Operator and module in which the step ended with an error."""
        self._spans: list[Span] = []
        self._open_spans: list[Span] = []
        self.start_sequence = self._end_sequence = 0
        self._sequence_starts: list[int] = []
        self._sequence_names: list[str] = []
        self._path = [OUTSIDE]
        self.batch = ""
        """Shapes and dtypes of what the model was called with."""

    # -- what is where ---------------------------------------------------------------------------------------------

    @property
    def num_ops(self) -> int:
        """Operators that have run; also the index of the next."""
        return len(self._op_names)

    @contextlib.contextmanager
    def silently(self) -> Iterator[None]:
        """What runs inside is ours, not the step's."""
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    def enroll(self, tensor: torch.Tensor, kind: str, name: str) -> Storage | None:
        """Put a storage that was there before the step on record; None if there is nothing to record."""
        tensor = inside(tensor)
        if not is_plain_or_fake(tensor):
            return None
        return self.find(tensor) or self.register(tensor, kind, name, -1)

    def enroll_gathered(self, parameter: torch.Tensor, name: str) -> None:
        """Put a parameter on record that FSDP2 gathers in one storage from time to time."""
        record = self.enroll(parameter, "parameter", name)
        if record is not None and not record.is_gathered:
            record.is_gathered = True
            self._gathered.append(_Gathered(record, parameter))

    def gathered_now(self) -> frozenset[int]:
        """Indices of the gathered parameters that are there."""
        return frozenset(entry.record.index for entry in self._gathered if entry.storage.nbytes())

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """The record of the tensor's storage."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def register(self, tensor: torch.Tensor, kind: str, name: str, born: int) -> Storage:
        """A new record."""
        storage = tensor.untyped_storage()
        record = Storage(
            index=len(self.storages), nbytes=storage.nbytes(), dtype=tensor.dtype, name=name, kind=kind, born=born
        )
        self.storages.append(record)
        if tensor.device.type != self.device.type:
            self.off_device.add(record.index)
        self.watch(storage, record, lambda: setattr(record, "dies", self.num_ops))
        return record

    def storage_of(self, record: Storage) -> torch.UntypedStorage | None:
        """The living storage of a record."""
        return next((ref() for ref, known in self._live.values() if known is record), None)

    def watch(self, storage: torch.UntypedStorage, record: Storage, when_dead: Callable[[], None]) -> None:
        """Call `when_dead` once the bytes of `storage` are freed."""
        key = storage._cdata

        def gone(ref: weakref.ref) -> None:
            entry = self._live.get(key)
            if entry is not None and entry[0] is ref:
                del self._live[key]
            when_dead()

        self._live[key] = (weakref.ref(storage, gone), record)

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self._is_silent and is_desugared(types):
            return NotImplemented
        kwargs = kwargs or {}
        # Torch detaches what it hands to saved-tensor hooks (an alias, and none of the step's own work), and asks fake
        # tensors for their device.
        if self._is_silent or func is _DETACH or func.namespace == "prim":
            return func(*args, **kwargs)
        index = self.num_ops
        for entry in self._gathered:
            entry.look(index)
        call = Call(
            index=index,
            func=func,
            args=tuple(self._frozen(arg, index) for arg in args),
            kwargs={key: self._frozen(arg, index) for key, arg in kwargs.items()},
            outputs=(),
            name="",
            seconds=0.0,
            is_random=_is_random(func, args, kwargs),
            is_collective=func.namespace in _COLLECTIVES,
        )
        try:
            out, mark = self._clock.run(func, args, kwargs)
        except Exception:
            self.failed_at = self.failed_at or f"{func.overloadpacket} in {self._path[-1] or 'the model'}"
            raise
        self._note_call(call, out)
        if self._holds_casts and self._is_autocast and self._num_forward_ops is None:
            self._hold_cast(func, args, out)
        self._marks.append(self._clock.seconds(mark, call))
        self._op_names.append(call.name)
        return out

    def _hold_cast(self, func: Any, args: tuple, out: Any) -> None:
        """Autocast remembers what it makes of leaves that need gradients, until its context is left."""
        source = args[0] if args else None
        if op_name(func.overloadpacket.__name__) not in CASTS or not isinstance(source, torch.Tensor):
            return
        if source.is_leaf and source.requires_grad and out.dtype != source.dtype:
            self._held_casts.append(out)

    def _note_call(self, call: Call, out: Any) -> None:
        inputs = {value.storage.index: value.storage for value in tree_leaves((call.args, call.kwargs)) if _is(value)}
        leaves = tree_leaves(out)
        written = _written(call) or self._written_unsaid(call, leaves)
        if any(storage.is_gathered for storage in written):
            # FSDP2 fills a parameter, with what is in it at any other time: no write that a recipe must know of.
            call.args, call.kwargs, written = (), {}, []
        for storage in written:
            storage.num_writes += 1
            storage.last_write = call.index
        call.outputs = tuple(self._output(leaf, call) for leaf in leaves)
        outputs = {value.storage.index: value.storage for value in call.outputs if value is not None and _is(value)}
        fresh = [s for s in outputs.values() if call.func._schema.is_mutable or s.index not in inputs]
        if self._num_forward_ops is not None:
            call.name = self._backward_name()
            for storage in fresh:
                storage.name = storage.name or f"{call.name}#{storage.index}"
            return
        self._op_sequences.append(-1)
        self._calls.append(call)
        op = op_name(call.func.overloadpacket.__name__)
        call.name = self._name(op) if fresh else self._view_name(op)
        is_cast = op in CASTS and bool(inputs) and all(is_parameter(s) for s in inputs.values())
        for number, storage in enumerate(fresh):
            storage.name = self.named[storage.index] = f"{call.name}:{number}" if number else call.name
            if is_cast:
                storage.is_parameter_cast = True
        self._note_sequence(call.name)
        self.saves.repark(written)

    def _written_unsaid(self, call: Call, leaves: list[Any]) -> list[Storage]:
        """Collectives of the older interface write into tensors that they are given, which their schemas do not say."""
        if not writes_unsaid(call):
            return []
        given = {value.storage.index for value in tree_leaves((call.args, call.kwargs)) if _is(value)}
        found = (self.find(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and is_plain_or_fake(leaf))
        return [*{record.index: record for record in found if record and record.index in given}.values()]

    def _view_name(self, op: str) -> str:
        path = self._path[-1]
        return f"{path}.{op}" if path else op

    def _frozen(self, arg: Any, index: int) -> Any:
        if isinstance(arg, torch.Tensor):
            return self._value(arg, self._input_record(arg, index))
        if isinstance(arg, list | tuple):
            return type(arg)(self._frozen(part, index) for part in arg)
        if isinstance(arg, dict):
            return {key: self._frozen(part, index) for key, part in arg.items()}
        return arg

    def _input_record(self, tensor: torch.Tensor, index: int) -> Storage:
        if not is_plain_or_fake(tensor):
            self._register_parts(tensor, "unknown", index)
            return _NOWHERE
        return self.find(tensor) or self.register(tensor, "unknown", f"unknown_{len(self.storages)}", index)

    def _register_parts(self, tensor: torch.Tensor, kind: str, index: int) -> None:
        """Sparse tensors and wrappers: their bytes count, and that is all."""
        with self.silently():
            for part in plain_parts(tensor):
                if self.find(part) is None:
                    self.register(part, kind, f"part_{len(self.storages)}", index)

    def _output(self, leaf: Any, call: Call) -> Value | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        if not is_plain_or_fake(leaf):
            self._register_parts(leaf, "made", call.index)
            return self._value(leaf, _NOWHERE)
        record = self.find(leaf)
        if record is None:
            record = self.register(leaf, "made", "", call.index)
            record.producer = call if self._num_forward_ops is None else None
        else:
            record.nbytes = max(record.nbytes, leaf.untyped_storage().nbytes())
        return self._value(leaf, record)

    def _value(self, tensor: torch.Tensor, record: Storage) -> Value:
        is_plain = record is not _NOWHERE and not tensor.is_conj() and not tensor.is_neg()
        strided = record is not _NOWHERE
        return Value(
            storage=record,
            version=record.num_writes,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()) if strided else (),
            offset=int(tensor.storage_offset()) if strided else 0,
            dtype=tensor.dtype,
            device=tensor.device,
            is_plain=is_plain,
        )

    # -- autograd's numbers ----------------------------------------------------------------------------------------

    def _note_sequence(self, name: str) -> None:
        """The node of the operator that is running has been made: it has the number before the next one."""
        number = torch.autograd._get_sequence_nr() - 1
        if number >= self.start_sequence and (not self._sequence_starts or number > self._sequence_starts[-1]):
            self._sequence_starts.append(number)
            self._sequence_names.append(name)

    def _backward_name(self) -> str:
        node = torch._C._current_autograd_node()
        number = self._op_sequences[-1] if node is None else node._sequence_nr()
        if not self.start_sequence <= number < self._end_sequence:
            # Gradient accumulators, and what a recomputation made in backward, have numbers beyond the forward's.
            number = self._op_sequences[-1]
        self._op_sequences.append(number)
        position = bisect.bisect_right(self._sequence_starts, number) - 1
        return f"{self._sequence_names[position] if position >= 0 else OUTSIDE}:backward"

    # -- modules ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def following(self, model: nn.Module, prefix: str = "") -> Iterator[None]:
        """Know which module runs, and what goes into and comes out of it."""
        hooks = []
        for name, module in model.named_modules(prefix=prefix):
            first = not is_fsdp(module)
            hooks.append(module.register_forward_pre_hook(self._entry(name), prepend=first, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._exit(name), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entry(self, name: str) -> Callable:
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not name and self._num_forward_ops is None:
                self._enter_root(args, kwargs)
            self._path.append(name)
            self._is_autocast = torch.is_autocast_enabled(self.device.type)
            self._module_calls[name] = self._module_calls.get(name, -1) + 1
            if name in self._layers and self.is_inside:
                now = torch.autograd._get_sequence_nr()
                span = Span(name=name, first_op=self.num_ops, end_op=0, first_sequence=now, end_sequence=0)
                self._open_spans.append(span)
            self._catch(name, "input", (args, kwargs))

        return enter

    def _exit(self, name: str) -> Callable:
        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            self._catch(name, "output", output)
            if len(self._path) > 1:
                self._path.pop()
            if self._open_spans and self._open_spans[-1].name == name:
                span = self._open_spans.pop()
                span.end_op, span.end_sequence = self.num_ops, torch.autograd._get_sequence_nr()
                self._spans.append(span)
            if not name:
                self.is_inside = False

        return leave

    def _enter_root(self, args: tuple, kwargs: dict) -> None:
        self._num_roots += 1
        if self._num_roots > 1:
            return
        self.is_inside = True
        self.batch = describe(args, kwargs)
        # The runtime's recorder starts here: what came before has no name that a plan could use.
        self.named.clear()
        self._counts.clear()
        self.start_sequence = torch.autograd._get_sequence_nr()
        for _, record in self._live.values():
            # Made from what the model does not own, by operators that a planned step cannot run again.
            record.producer = None
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None:
                self.enroll(leaf, "input", "input")

    def region(self) -> str:
        """The layer that is running."""
        return self._open_spans[-1].name if self._open_spans else ""

    def _catch(self, name: str, side: str, tree: Any) -> None:
        """Remember which tensors an ordinary hook on this module could hold on to."""
        if not self.is_inside or self._is_silent or name in self.skipped:
            return
        for number, given in enumerate(tree_leaves(tree)):
            leaf = inside(given) if isinstance(given, torch.Tensor) else None
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not is_plain_or_fake(leaf):
                continue
            record = self.find(leaf)
            if record is None or record.index in self._caught or not self.saves.is_movable(leaf):
                continue
            if record.index not in self.named or not self.saves.is_activation(leaf, record):
                continue
            node = self.saves.new_node(record, leaf, self.named[record.index])
            node.anchor = Anchor(module=name, side=side, leaf=number, call=self._module_calls[name])
            self._caught[record.index] = node

    # -- the end ---------------------------------------------------------------------------------------------------

    def begin_backward(self, results: list[torch.Tensor], model: nn.Module) -> None:
        """The forward is over. `results` are what is held on purpose: the loss."""
        self._held_casts.clear()
        now = {id(self.find(buffer)) for buffer in model.buffers() if is_plain_or_fake(buffer)}
        for record in self.storages:
            # A recipe would look a buffer up by its name, and find what has replaced it.
            if record.kind == "buffer" and id(record) not in now:
                record.kind = "replaced"
        for entry in self._gathered:
            # FSDP2 leaves the version as it is, so somebody else has written to the parameter.
            if entry.parameter._version != entry.version:
                entry.record.kind = "replaced"
        self._num_forward_ops = self.num_ops
        self._end_sequence = torch.autograd._get_sequence_nr()
        held = {tensor.untyped_storage()._cdata for tensor in [*results, *model.buffers()] if is_plain_or_fake(tensor)}
        self._hidden = [
            record
            for key, (_, record) in self._live.items()
            if key not in held and record.kind == "made" and not record.is_parameter_cast
            if record.index not in self.saves.nodes and record.index not in self.saves.kept and record.nbytes
        ]

    def finish(self, gradients: Iterable[torch.Tensor | None]) -> Trace:
        """What was seen. Call it once everything of the step has been let go, but the gradients of parameters."""
        assert self._num_forward_ops is not None
        nodes = [node for node in self.saves.nodes.values() if node.reads]
        nodes += [node for index, node in self._caught.items() if index not in self.saves.nodes]
        local = [inside(grad) for grad in gradients if grad is not None]
        made = [self.find(grad) for grad in local if is_plain_or_fake(grad)]
        for entry in self._gathered:
            entry.close(self.num_ops)
        # What goes from here on is no part of the step.
        self._live.clear()
        for record in self.storages:
            record.dies = None if record.dies == self.num_ops else record.dies
        unread = [(index, node.release) for index, node in self.saves.nodes.items() if not node.reads]
        return Trace(
            calls=self._calls,
            op_names=self._op_names,
            op_seconds=self._clock.settle(self._marks),
            op_sequences=self._op_sequences,
            num_forward_ops=self._num_forward_ops,
            storages=self.storages,
            off_device=self.off_device,
            nodes=sorted(nodes, key=lambda node: (node.saved, node.storage.index)),
            never_read=unread,
            staying={**self.saves.staying, **{index: "never read by backward" for index, _ in unread}},
            ambiguous=self.saves.ambiguous,
            gradients={record.index for record in made if record is not None and record.kind == "made"},
            hidden=[record for record in self._hidden if record.index not in self.off_device],
            spans=self._spans,
            start_sequence=self.start_sequence,
            gathered=[span for entry in self._gathered for span in entry.spans],
        )


class _Gathered:
    """A parameter that is there as a whole only now and then, and when that was."""

    __slots__ = ("_now", "_start", "parameter", "record", "spans", "storage", "version")

    def __init__(self, record: Storage, parameter: torch.Tensor) -> None:
        self.record = record
        self.parameter = parameter
        self.version = parameter._version
        self.storage = parameter.untyped_storage()
        self.spans: list[tuple[int, int, int]] = []
        """(start, end, bytes) of each time that it was there, in operators."""
        self._now = self._start = 0

    def look(self, index: int) -> None:
        """Before operator `index`: is it as large as it was?"""
        self._turn(index, self.storage.nbytes())

    def close(self, index: int) -> None:
        """Operator `index` is past the end of the step."""
        self.look(index)
        self._turn(index, 0)

    def _turn(self, index: int, nbytes: int) -> None:
        if nbytes == self._now:
            return
        if self._now:
            self.spans.append((self._start, index, self._now))
        self._now, self._start = nbytes, index


_NOWHERE = Storage(index=-1, nbytes=0, dtype=torch.uint8, name="", kind="unknown")
"""Of tensors without a storage of their own."""


def _is(value: Any) -> bool:
    return isinstance(value, Value) and value.storage is not _NOWHERE


def _is_random(func: Any, args: tuple, kwargs: dict) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # Attention draws only if it drops something.
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return (args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)) != 0.0
    return True


def _written(call: Call) -> list[Storage]:
    """Storages that the operator writes into in place."""
    schema = call.func._schema
    if not schema.is_mutable:
        return []
    found: dict[int, Storage] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
        for leaf in tree_leaves(value):
            if _is(leaf):
                found[leaf.storage.index] = leaf.storage
    return list(found.values())
