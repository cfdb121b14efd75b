"""The observed step: a dispatch mode, saved-tensor hooks and module hooks that write down who made, saved, read and
freed which storage.

What: `StepRecorder` extends the runtime's recorder (same names, by construction) with one `graph.Call` for each
operator, one `graph.Storage` for each block of bytes with its birth and its death, and one `Node` for each storage that
autograd saves or that a module hook could catch. Saved activations are parked (saved_tensors.py), so that a storage
dies when everybody but autograd has let go of it, and is seen to come back when backward reads it.

Why record lifetimes and not sample bytes: bytes alive at operator `i` are those of storages with born <= i < dies, so
every curve follows from the lifetimes, also that of a model whose equal layers ran only once (expand.py).

Cost: about 0.1 ms an operator. Not covered: storages that grow (`resize_`) count with their largest size; what backward
hooks of the user's hold.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.core.recipe import RetainedInput
from lowtide.errors import ConfigError
from lowtide.profiling.compiled_calls import CompiledCall, run_compiled
from lowtide.profiling.op_memory import OpMemory
from lowtide.profiling.op_timer import Clock
from lowtide.profiling.producer_names import CASTS, Recorder, modules_to_follow, op_name, refuse_misled
from lowtide.profiling.saved_tensors import CodecOf, SavedTensorRecorder, is_parameter
from lowtide.profiling.stash import ByteStash
from lowtide.profiling.step_record import Node, Span, Trace
from lowtide.profiling.storages import NOWHERE, Storages, value_of
from lowtide.recipes.graph import Call, Storage, Value
from lowtide.recipes.operators import has_statistics, writes_unsaid, written_values
from lowtide.tensors.compiled import calls_wrapped, compiled_parts
from lowtide.tensors.fsdp import is_fsdp
from lowtide.tensors.kinds import is_plain_or_fake
from lowtide.tensors.private import (
    current_autograd_node,
    next_sequence_number,
    schema_of,
    sequence_number,
    tree_leaves,
)
from lowtide.tensors.second_run import versions_of_parameters, why_not_rerun
from lowtide.tensors.wrappers import inside, is_desugared

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_DETACH = torch.ops.aten.detach.default
OUTSIDE = "outside"
"""Path of what runs outside of the model's forward."""


class StepRecorder(Recorder):
    """One step. Use: `with observer.following(model), observer: ...`, `observer.hooks()` around the forward."""

    def __init__(
        self,
        *,
        device: torch.device,
        clock: Clock,
        stash: ByteStash,
        layers: tuple[str, ...],
        codec_of: CodecOf,
        holds_casts: bool = False,
        memory: OpMemory | None = None,
    ) -> None:
        super().__init__(set())
        self._memory = memory
        """None where nobody counts what operators hold inside."""
        self.about_to_write: Callable[[torch.UntypedStorage], None] | None = None
        """Called before an operator writes to bytes that were there before the step."""
        # As autocast's cache would: it is off while this step runs, but on in those that follow.
        self._holds_casts = holds_casts
        self._held_casts: list[Any] = []
        self._is_autocast = False
        self.device = device
        self.storages = Storages(device, lambda: self.num_ops)
        self.clock = clock
        self.saves = SavedTensorRecorder(self, stash, codec_of)
        self._layers = frozenset(layers)
        self._calls: list[Call] = []
        self._op_names: list[str] = []
        self._marks: list[Any] = []
        self._op_sequences: list[int] = []
        self._num_forward_ops: int | None = None
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
        self._given: list[tuple[Span, dict[int, int]]] = []
        """For each call of a layer: the records of what it was given, and how often each had been written."""
        self._versions: list[tuple[Span, list[int]]] = []
        """For each call of a layer: how often its parameters had been written to before."""
        self.start_sequence = self._end_sequence = 0
        self._sequence_starts: list[int] = []
        self._sequence_names: list[str] = []
        self._path = [OUTSIDE]
        self.compiled: CompiledCall | None = None
        """The call of a compiled part that is under way."""
        self.temporary: list[tuple[int, int]] = []
        """(operator, bytes), as in `Trace`."""
        self.leaves: list[torch.Tensor] = []
        """Of what the model was called with."""
        self.batch = ""
        """Shapes and dtypes of what the model was called with."""

    # -- where the step is -----------------------------------------------------------------------------------------

    @property
    def num_ops(self) -> int:
        """Operators that have run; also the index of the next."""
        return len(self._op_names)

    @property
    def is_backward(self) -> bool:
        """The forward is over."""
        return self._num_forward_ops is not None

    @contextlib.contextmanager
    def silently(self) -> Iterator[None]:
        """What runs inside is ours, not the step's."""
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self._is_silent and is_desugared(types):
            return NotImplemented
        kwargs = kwargs or {}
        # Torch detaches what it hands to saved-tensor hooks (an alias, and none of the step's own work), and asks fake
        # tensors for their device.
        if self._is_silent or self.is_requested or func is _DETACH or func.namespace == "prim":
            return func(*args, **kwargs)
        refuse_misled(func, args)
        index = self.num_ops
        self.storages.look_at_gathered()
        call = Call(
            index=index,
            func=func,
            args=tuple(self.frozen(arg) for arg in args),
            kwargs={key: self.frozen(arg) for key, arg in kwargs.items()},
            outputs=(),
            name="",
            seconds=0.0,
            is_random=_is_random(func, args, kwargs),
            is_collective=func.namespace in COLLECTIVES,
        )
        if self.about_to_write is not None and (
            schema_of(func).is_mutable or writes_unsaid(call) or has_statistics(func)
        ):
            self._save_what_it_writes(call, self.about_to_write)
        if self._memory is not None:
            self._memory.begin()
        try:
            out, mark = self.clock.run(func, args, kwargs)
        except Exception:
            self.failed_at = self.failed_at or f"{func.overloadpacket} in {self._path[-1] or 'the model'}"
            raise
        if self._memory is not None:
            call.temporary_bytes = self._memory.end()
            self.temporary.append((index, call.temporary_bytes))
        self._note_call(call, out)
        if self._holds_casts and self._is_autocast and self._num_forward_ops is None:
            self._hold_cast(func, args, out)
        self._marks.append(self.clock.seconds(mark, call))
        self._op_names.append(call.name)
        return out

    def _save_what_it_writes(self, call: Call, about_to_write: Callable[[torch.UntypedStorage], None]) -> None:
        written = _written(call)
        if writes_unsaid(call):
            written = [value.storage for value in tree_leaves((call.args, call.kwargs)) if _is(value)]
        for record in written:
            # Gathered parameters are filled and emptied by FSDP2 itself.
            if record.kind != "made" and not record.is_gathered:
                storage = self.storages.storage_of(record)
                if storage is not None:
                    about_to_write(storage)

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
        call.outputs = tuple(self.output(leaf, call) for leaf in leaves)
        outputs = {value.storage.index: value.storage for value in call.outputs if value is not None and _is(value)}
        fresh = [s for s in outputs.values() if schema_of(call.func).is_mutable or s.index not in inputs]
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
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and is_plain_or_fake(leaf))
        found = map(self.storages.find, tensors)
        return [*{record.index: record for record in found if record and record.index in given}.values()]

    def _view_name(self, op: str) -> str:
        path = self._path[-1]
        return f"{path}.{op}" if path else op

    def frozen(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return value_of(arg, self._input_record(arg))
        if isinstance(arg, list | tuple):
            return type(arg)(self.frozen(part) for part in arg)
        if isinstance(arg, dict):
            return {key: self.frozen(part) for key, part in arg.items()}
        return arg

    def _input_record(self, tensor: torch.Tensor) -> Storage:
        if not is_plain_or_fake(tensor):
            return self._parts(tensor, "unknown")
        return self.storages.find_or_register(tensor, "unknown")

    def _parts(self, tensor: torch.Tensor, kind: str) -> Storage:
        with self.silently():
            self.storages.register_parts(tensor, kind)
        return NOWHERE

    def output(self, leaf: Any, call: Call) -> Value | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        if not is_plain_or_fake(leaf):
            return value_of(leaf, self._parts(leaf, "made"))
        record = self.storages.find(leaf)
        if record is None:
            record = self.storages.register(leaf, "made", "", call.index)
            record.producer = call if self._num_forward_ops is None else None
        else:
            record.nbytes = max(record.nbytes, leaf.untyped_storage().nbytes())
        return value_of(leaf, record)

    def next_name(self, op: str) -> str:
        """The name of what the next `op` of the module that is running makes."""
        return self._name(op)

    def note_compiled(self, call: Call, mark: Any, sequence: int) -> None:
        """A compiled part has run, forward or backward, as one operator. `sequence`: autograd's number of it."""
        if self.is_backward:
            is_known = self.start_sequence <= sequence < self._end_sequence
            self._op_sequences.append(sequence if is_known else self._op_sequences[-1])
        else:
            self._op_sequences.append(-1)
            self._calls.append(call)
            if not self._sequence_starts or sequence > self._sequence_starts[-1]:
                self._sequence_starts.append(sequence)
                self._sequence_names.append(call.name)
        self._marks.append(mark)
        self._op_names.append(call.name)

    # -- autograd's numbers ----------------------------------------------------------------------------------------

    def _note_sequence(self, name: str) -> None:
        """The node of the operator that is running has been made: it has the number before the next one."""
        number = next_sequence_number() - 1
        if number >= self.start_sequence and (not self._sequence_starts or number > self._sequence_starts[-1]):
            self._sequence_starts.append(number)
            self._sequence_names.append(name)

    def _backward_name(self) -> str:
        node = current_autograd_node()
        number = self._op_sequences[-1] if node is None else sequence_number(node)
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
        hooks: list[Any] = []
        compiled = compiled_parts(model)
        for name, module in modules_to_follow(model, prefix):
            first = not is_fsdp(module)
            hooks_of_one = (self.entry(name), self.begin(name), self.end(name), self.exit(name))
            entry, begin, end, leave = map(self.here, hooks_of_one)
            hooks.append(module.register_forward_pre_hook(entry, prepend=first, with_kwargs=True))
            hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(module.register_forward_hook(end, prepend=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            with calls_wrapped(compiled, functools.partial(run_compiled, self)):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def entry(self, name: str) -> Callable:
        """For before other hooks: what these run is the module's own."""

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not name and self._num_forward_ops is None:
                self._enter_root(args, kwargs)
            self._path.append(name)
            self._is_autocast = torch.is_autocast_enabled(self.device.type)
            self._module_calls[name] = self._module_calls.get(name, -1) + 1

        return enter

    def begin(self, name: str) -> Callable:
        """For after other hooks, which may give the forward something else: there the runtime's wrapper stands."""

        def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if name in self._layers and self.is_inside:
                now = next_sequence_number()
                span = Span(name=name, first_op=self.num_ops, end_op=0, first_sequence=now, end_sequence=0)
                self._open_spans.append(span)
                with self.silently():
                    span.why_not = why_not_rerun(module, args, kwargs)
                self._given.append((span, self._enter_layer(name, (args, kwargs), span)))
                self._versions.append((span, versions_of_parameters(module)))
            self._catch(name, "input", (args, kwargs))

        return begin

    def end(self, name: str) -> Callable:
        """For before other hooks: what they make of the output (the sum over tensor-parallel ranks) no wrapper sees
        there. It is caught where a module around this one gives it out, or the next one takes it in."""

        def end(module: nn.Module, args: tuple, output: Any) -> None:
            self._catch(name, "output", output)

        return end

    def exit(self, name: str) -> Callable:
        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if len(self._path) > 1:
                self._path.pop()
            if self._open_spans and self._open_spans[-1].name == name:
                span = self._open_spans.pop()
                self._leave_layer(span, module)
                span.end_op, span.end_sequence = self.num_ops, next_sequence_number()
                self._spans.append(span)
            if not name:
                self.is_inside = False

        return leave

    def _enter_layer(self, name: str, tree: Any, span: Span) -> dict[int, int]:
        """What the layer is given, by index, and how often each was written; nodes for what has none yet."""
        given: dict[int, int] = {}
        for number, leaf in enumerate(tree_leaves(tree)):
            if not isinstance(leaf, torch.Tensor):
                continue
            local = inside(leaf)
            record = self.storages.find(local) if is_plain_or_fake(local) else None
            if record is None:
                span.why_not = "it is given a tensor that is not an ordinary one"
                continue
            given[record.index] = record.num_writes
            is_known = record.index in self._caught or record.index in self.saves.nodes
            if not is_known and record.index in self.named and self.saves.is_movable(local):
                node = self.saves.new_node(record, local, self.named[record.index])
                node.retained_input = RetainedInput(
                    module=name, side="input", leaf=number, call=self._module_calls[name]
                )
                node.is_given = not leaf.is_floating_point() or not self.saves.is_activation(leaf, record)
                self._caught[record.index] = node
        return given

    def _leave_layer(self, span: Span, module: nn.Module) -> None:
        given = next(given for known, given in reversed(self._given) if known is span)
        if any(self.storages.records[index].num_writes != writes for index, writes in given.items()):
            span.why_not = "it writes into its input"
        versions = next(versions for known, versions in reversed(self._versions) if known is span)
        if versions != versions_of_parameters(module):
            span.why_not = "it writes to its own parameters"

    def _enter_root(self, args: tuple, kwargs: dict) -> None:
        self._num_roots += 1
        if self._num_roots > 1:
            return
        self.is_inside = True
        self.batch = describe(args, kwargs)
        self.leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
        # The runtime's recorder starts here: what came before has no name that a plan could use.
        self.named.clear()
        self._counts.clear()
        self.start_sequence = next_sequence_number()
        for record in self.storages.alive():
            # Made from what the model does not own, by operators that a planned step cannot run again.
            record.producer = None
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None:
                self.storages.enroll(leaf, "input", "input")

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
            record = self.storages.find(leaf)
            if record is None or record.index in self._caught or not self.saves.is_movable(leaf):
                continue
            if record.index not in self.named or not self.saves.is_activation(leaf, record):
                continue
            node = self.saves.new_node(record, leaf, self.named[record.index])
            node.retained_input = RetainedInput(module=name, side=side, leaf=number, call=self._module_calls[name])
            self._caught[record.index] = node

    # -- the end ---------------------------------------------------------------------------------------------------

    def begin_backward(self, results: list[torch.Tensor], model: nn.Module) -> None:
        """The forward is over. `results` are what is held on purpose: the loss."""
        if self.saves.read_early:
            raise ConfigError(
                f"lowtide: '{self.saves.read_early}' is read within the forward pass: {type(model).__name__} takes "
                "gradients there itself (torch.autograd.grad, for forces of an energy, say), and a plan for a budget "
                "does not cover that. Use lowtide.apply with rules"
            )
        self._held_casts.clear()
        self.storages.note_replaced(model.buffers())
        self._num_forward_ops = self.num_ops
        self._end_sequence = next_sequence_number()
        self._hidden = [
            record
            for record in self.storages.alive(but=[*results, *model.buffers()])
            if record.kind == "made" and not record.is_parameter_cast
            if record.index not in self.saves.nodes and record.index not in self.saves.kept and record.nbytes
        ]

    def _names_of_saved(self) -> dict[int, str]:
        return {index: node.name for index, node in self.saves.nodes.items()}

    def finish(self, gradients: Iterable[torch.Tensor | None]) -> Trace:
        """What was seen. Call it once everything of the step has been let go, but the gradients of parameters."""
        assert self._num_forward_ops is not None
        staying = self.saves.staying
        nodes = [node for index, node in self.saves.nodes.items() if node.reads and index not in staying]
        nodes += [node for index, node in self._caught.items() if index not in self.saves.nodes]
        known = {**{index: node.name for index, node in self._caught.items()}, **self._names_of_saved()}
        for span, given in self._given:
            own = [index for index in given if self.storages.records[index].kind in ("made", "unknown")]
            span.inputs = tuple(known.get(index, self.storages.records[index].name) for index in own)
        local = [inside(grad) for grad in gradients if grad is not None]
        made = [self.storages.find(grad) for grad in local if is_plain_or_fake(grad)]
        self.storages.close()
        unread = [index for index, node in self.saves.nodes.items() if not node.reads and index not in staying]
        stuck = [*unread, *(index for index in self.saves.nodes if index in staying)]
        for index in stuck:  # by the name of its first save, as the runtime has it; later writes gave it others
            self.storages.records[index].name = self.saves.nodes[index].name
        return Trace(
            calls=self._calls,
            op_names=self._op_names,
            op_seconds=self.clock.settle(self._marks),
            op_sequences=self._op_sequences,
            num_forward_ops=self._num_forward_ops,
            storages=self.storages.records,
            off_device=self.storages.off_device,
            nodes=sorted(nodes, key=lambda node: (node.saved, node.storage.index)),
            never_read=[(index, self.saves.nodes[index].release) for index in stuck],
            staying={**staying, **dict.fromkeys(unread, "never read by backward")},
            ambiguous=self.saves.ambiguous,
            gradients={record.index for record in made if record is not None and record.kind == "made"},
            hidden=[record for record in self._hidden if record.index not in self.storages.off_device],
            spans=self._spans,
            start_sequence=self.start_sequence,
            temporary=self.temporary,
            gathered=[span for entry in self.storages.gathered for span in entry.spans],
        )


def _is(value: Any) -> bool:
    return isinstance(value, Value) and value.storage is not NOWHERE


def _is_random(func: Any, args: tuple, kwargs: dict) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # Attention draws only if it drops something.
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            return (args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)) != 0.0
    return True


def _written(call: Call) -> list[Storage]:
    """Storages that the operator writes into in place."""
    return list({value.storage.index: value.storage for value in written_values(call) if _is(value)}.values())


def describe(args: tuple, kwargs: dict[str, Any]) -> str:
    """`input_ids=int64[2, 8], labels=int64[2, 8]`: the tensors of a call, as one line."""
    parts = [("", value) for value in args] + list(kwargs.items())
    words = []
    for key, value in parts:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                dtype = str(leaf.dtype).removeprefix("torch.")
                words.append(f"{key}{'=' if key else ''}{dtype}{list(leaf.shape)}")
    return ", ".join(words)
