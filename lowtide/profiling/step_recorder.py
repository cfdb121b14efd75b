"""The observed step: a dispatch mode, saved-tensor hooks and module hooks that write down who made, saved, read and
freed which storage.

What: `StepRecorder` extends the runtime's recorder (same names, by construction) with one `OpCall` for each operator,
one `Storage` for each block of bytes with its birth and its death, and one `NodeRecord` for each storage that autograd
saves or that a module hook could catch. Saved activations are parked (saved_tensors.py), so that a storage dies when
everybody but autograd has let go of it, and is seen to come back when backward reads it.
Why record lifetimes and not sample bytes: bytes alive at operator `i` are those of storages with born <= i < dies, so
every curve follows from the lifetimes, also that of a model whose equal layers ran only once (fake/expand_layers.py).

A compiled part does not show its operators, so its call is put on record as one operator (`run_compiled`): what it was
given, what it saved and gave out, its time, and how many bytes it held at its worst moment beyond these (from the
allocations that torch notes for its profilers). Each of its graphs is one operator more in backward, recorded by hooks
on autograd's nodes. No recipe goes through a compiled part; what it gave out may start one. While it runs, the recorder
is no dispatch mode: under one the compiler would leave the part as it is, and another step would be observed.

Cost: about 0.1 ms an operator; 0.2 ms a call of a compiled part, and a copy of its large buffers, which it may write
to. Not covered: storages that grow (`resize_`) count with their largest size; what backward hooks of the user's hold;
how many bytes a compiled part holds inside, while a profiler of the user's is on; what other threads allocate meanwhile
counts too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.engines.device_ops import TorchDevice
from lowtide.errors import ConfigError
from lowtide.profiling.module_watch import ModuleWatch
from lowtide.profiling.op_timer import Clock, held_bytes
from lowtide.profiling.producer_names import CASTS, COMPILED, Recorder, modules_to_follow, op_name, refuse_misled
from lowtide.profiling.saved_tensors import ByteStash, CodecOf, SavedTensorRecorder, is_parameter
from lowtide.profiling.step_record import CompiledCall, StepState, Trace
from lowtide.profiling.storages import NOWHERE
from lowtide.recipes.graph import OpCall, Storage, Value, has_statistics, writes_unsaid, written_values
from lowtide.tensors.compiled import calls_wrapped, compiled_parts, graphs_between
from lowtide.tensors.fsdp import is_fsdp
from lowtide.tensors.kinds import is_plain, is_plain_or_fake, tensors_in
from lowtide.tensors.modes import RandomState
from lowtide.tensors.private import next_sequence_number, schema_of, sequence_number, tree_leaves, version_of
from lowtide.tensors.ranks import has_company
from lowtide.tensors.wrappers import inside, is_desugared

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_OF_TORCH = COLLECTIVES | {"aten", "prims", "lowtide"}
_DETACH = torch.ops.aten.detach.default


class StepRecorder(Recorder):
    """One step. Use: `with recorder.following(model), recorder:`, `recorder.saves.hooks()` around the forward."""

    def __init__(
        self,
        *,
        device: torch.device,
        clock: Clock,
        stash: ByteStash,
        layers: tuple[str, ...],
        codec_of: CodecOf,
        holds_casts: bool = False,
        counted: TorchDevice | None = None,
    ) -> None:
        super().__init__(set())
        self.state = StepState(device, clock, self, self._name)
        self.saves = SavedTensorRecorder(self.state, stash, codec_of)
        self.watch = ModuleWatch(self.state, self.saves, layers, self._counts.clear)
        self._path = self.state.path
        self._counted = counted
        """Whose allocator counts what operators hold inside."""
        # As autocast's cache would: it is off while this step runs, but on in those that follow.
        self._held_casts: list[Any] | None = [] if holds_casts else None
        self.casts: list[tuple[int, int, int]] = []
        """Of these: the operator, autograd's number of the next one, and bytes."""
        self.failed_at = ""
        """Operator and module in which the step ended with an error."""
        self._hidden: list[Storage] = []

    @property
    def num_ops(self) -> int:
        """Operators that have run; also the index of the next."""
        return self.state.ops.count

    @property
    def gathered(self) -> list[tuple[int, int, int]]:
        """Of a step that is over: when each parameter that FSDP2 gathers was there (first operator, end), and its
        bytes."""
        return [span for entry in self.state.storages.gathered for span in entry.spans]

    @contextlib.contextmanager
    def following(self, model: nn.Module, prefix: str = "") -> Iterator[None]:
        """Know which module runs, and what goes into and comes out of it."""
        hooks: list[Any] = []
        watch, compiled = self.watch, compiled_parts(model)
        for name, module in modules_to_follow(model, prefix):
            first = not is_fsdp(module)
            hooks_of_one = (watch.enter, watch.begin, watch.end, watch.leave)
            enter, begin, end, leave = (self.here(functools.partial(hook, name)) for hook in hooks_of_one)
            hooks.append(module.register_forward_pre_hook(enter, prepend=first, with_kwargs=True))
            hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(module.register_forward_hook(end, prepend=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            with calls_wrapped(compiled, functools.partial(run_compiled, watch)):
                yield
        finally:
            watch.leaves.clear()  # else the recorder, a cycle, would hold them until a collection
            for hook in hooks:
                hook.remove()

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        state = self.state
        if not state.is_silent and is_desugared(types):
            return NotImplemented
        kwargs = kwargs or {}
        # Torch detaches what it hands to saved-tensor hooks (an alias, and none of the step's own work), and asks fake
        # tensors for their device.
        if state.is_silent or self.is_requested or func is _DETACH or func.namespace == "prim":
            return func(*args, **kwargs)
        refuse_misled(func, args)
        state.storages.look_at_gathered()
        call = OpCall(
            index=state.ops.count,
            func=func,
            args=tuple(state.frozen(arg) for arg in args),
            kwargs={key: state.frozen(arg) for key, arg in kwargs.items()},
            outputs=(),
            name="",
            seconds=0.0,
            is_collective=func.namespace in COLLECTIVES,
        )
        if state.about_to_write is not None and (
            schema_of(func).is_mutable or writes_unsaid(call) or has_statistics(func)
        ):
            self._save_what_it_writes(call, state.about_to_write)
        if self._counted is not None:
            self._counted.reset_peak()
        given = [] if func.namespace in _OF_TORCH else [t for t in tensors_in((args, kwargs)) if is_plain(t)]
        random_state = RandomState(given) if given else None
        try:
            out, mark = state.ops.clock.run(func, args, kwargs)
        except Exception:
            self.failed_at = self.failed_at or f"{func.overloadpacket} in {self.path or 'the model'}"
            raise
        if self._counted is not None:
            call.temporary_bytes = held_bytes(self._counted)
            state.ops.temporary.append((call.index, call.temporary_bytes))
        call.has_drawn = random_state is not None and not random_state.is_same(RandomState(given))
        sequence = self._note_call(call, out)
        if self._held_casts is not None and self.watch.is_autocast and not state.ops.is_backward:
            self._hold_cast(self._held_casts, func, args, out)
        state.ops.add(call, mark, sequence)
        return out

    def _save_what_it_writes(self, call: OpCall, about_to_write: Callable[[torch.UntypedStorage], None]) -> None:
        written = _written(call)
        if writes_unsaid(call):
            written = [value.storage for value in tree_leaves((call.args, call.kwargs)) if _is(value)]
        for record in written:
            # Gathered parameters are filled and emptied by FSDP2 itself.
            if record.kind != "made" and not record.is_gathered:
                storage = self.state.storages.storage_of(record)
                if storage is not None:
                    about_to_write(storage)

    def _hold_cast(self, held: list[Any], func: Any, args: tuple, out: Any) -> None:
        """Autocast remembers what it makes of leaves that need gradients, until its context is left."""
        source = args[0] if args else None
        if op_name(func.overloadpacket.__name__) not in CASTS or not isinstance(source, torch.Tensor):
            return
        if source.is_leaf and source.requires_grad and out.dtype != source.dtype:
            held.append(out)
            number = next_sequence_number() - self.state.ops.start_sequence
            self.casts.append((self.num_ops, number, out.nbytes))

    def _note_call(self, call: OpCall, out: Any) -> int:
        """Write down what a call gave out and wrote to, and its name. Returns autograd's number of it."""
        state = self.state
        inputs = {value.storage.index: value.storage for value in tree_leaves((call.args, call.kwargs)) if _is(value)}
        leaves = tree_leaves(out)
        written = _written(call) or self._written_unsaid(call, leaves)
        if any(storage.is_gathered for storage in written):
            # FSDP2 fills a parameter, with what is in it at any other time: no write that a recipe must know of.
            call.args, call.kwargs, written = (), {}, []
        for storage in written:
            storage.num_writes += 1
        call.outputs = tuple(state.output(leaf, call) for leaf in leaves)
        outputs = {value.storage.index: value.storage for value in call.outputs if value is not None and _is(value)}
        # What another call has made came in by a tensor of a class of the user's, which is no value here.
        mine = {s.index for s in outputs.values() if s.producer is None or s.producer is call} - inputs.keys()
        fresh = [s for s in outputs.values() if schema_of(call.func).is_mutable or s.index in mine]
        if state.ops.is_backward:
            sequence, call.name = state.ops.backward_now()
            for storage in fresh:
                storage.name = storage.name or f"{call.name}#{storage.index}"
            return sequence
        op = op_name(call.func.overloadpacket.__name__)
        call.name = self._name(op) if fresh else ".".join(filter(None, (self.path, op)))
        is_cast = op in CASTS and bool(inputs) and all(is_parameter(s) for s in inputs.values())
        for number, storage in enumerate(fresh):
            storage.name = state.named[storage.index] = f"{call.name}:{number}" if number else call.name
            if is_cast:
                storage.is_parameter_cast = True
        state.ops.note_node(call.name)
        self.saves.repark(written)
        return -1

    def _written_unsaid(self, call: OpCall, leaves: list[Any]) -> list[Storage]:
        """Collectives of the older interface write into tensors that they are given, which their schemas do not say."""
        if not writes_unsaid(call):
            return []
        given = {value.storage.index for value in tree_leaves((call.args, call.kwargs)) if _is(value)}
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and is_plain_or_fake(leaf))
        found = map(self.state.storages.find, tensors)
        return [*{record.index: record for record in found if record and record.index in given}.values()]

    # -- the end ---------------------------------------------------------------------------------------------------

    def begin_backward(self, results: list[torch.Tensor], model: nn.Module) -> None:
        """The forward is over. `results` are what is held on purpose: the loss."""
        saves, storages = self.saves, self.state.storages
        if saves.read_early:
            raise ConfigError(
                f"lowtide: '{saves.read_early}' is read within the forward pass: {type(model).__name__} takes "
                "gradients there itself (torch.autograd.grad, for forces of an energy, say), and a plan for a budget "
                "does not cover that. Use lowtide.apply with rules"
            )
        self._held_casts = None
        storages.note_replaced(model.buffers())
        self.state.ops.begin_backward()
        self._hidden = [
            record
            for record in storages.alive(but=[*results, *model.buffers()])
            if record.kind == "made" and not record.is_parameter_cast
            if record.index not in saves.nodes and record.index not in saves.kept and record.nbytes
        ]

    def finish(self, gradients: Iterable[torch.Tensor | None]) -> Trace:
        """What was seen. Call it once everything of the step has been let go, but the gradients of parameters."""
        saves, storages = self.saves, self.state.storages
        nodes = [node for index, node in saves.nodes.items() if node.reads and index not in saves.staying]
        nodes += [node for index, node in self.watch.caught.items() if index not in saves.nodes]
        spans = self.watch.spans()
        local = [inside(grad) for grad in gradients if grad is not None]
        made = [storages.find(grad) for grad in local if is_plain_or_fake(grad)]
        storages.close()
        self.state.ops.finish()
        unread = [index for index, node in saves.nodes.items() if not node.reads and index not in saves.staying]
        stuck = [*unread, *(index for index in saves.nodes if index in saves.staying)]
        for index in stuck:  # by the name of its first save, as the runtime has it; later writes gave it others
            storages.records[index].name = saves.nodes[index].name
        return Trace(
            ops=self.state.ops,
            storages=storages.records,
            off_device=storages.off_device,
            nodes=sorted(nodes, key=lambda node: (node.saved, node.storage.index)),
            never_read=[(index, saves.nodes[index].release) for index in stuck],
            staying={**saves.staying, **dict.fromkeys(unread, "never read by backward")},
            ambiguous=saves.ambiguous,
            gradients={record.index for record in made if record is not None and record.kind == "made"},
            hidden=[record for record in self._hidden if record.index not in storages.off_device],
            spans=spans,
            gathered=self.gathered,
        )


def _is(value: Any) -> bool:
    return isinstance(value, Value) and value.storage is not NOWHERE


def _written(call: OpCall) -> list[Storage]:
    """Storages that the operator writes into in place."""
    return list({value.storage.index: value.storage for value in written_values(call) if _is(value)}.values())


# -- compiled parts ---------------------------------------------------------------------------------------------------


def run_compiled(watch: ModuleWatch, part: tuple[str, nn.Module], call: Callable, args: tuple, kwargs: dict) -> Any:
    """What `call` gives; the call of the compiled `part` (name, module) is on record afterwards."""
    name, module = part
    watch.enter(name, module, args, kwargs)
    watch.begin(name, module, args, kwargs)
    output = None
    try:
        output = _run(watch.state, module, call, args, kwargs)
        watch.end(name, module, args, output)
        return output
    finally:
        watch.leave(name, module, args, output)


def _run(state: StepState, module: nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
    ops = state.ops
    state.storages.look_at_gathered()
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    note_writes = _watch_writes(state, [*given, *module.buffers()])
    # Nobody sees whether it has collectives; then ranks must do the same.
    record = _record_of(state, "", (state.frozen(given),), is_collective=has_company())
    under_way, sequence, stops = CompiledCall(state, record), next_sequence_number(), [t.grad_fn for t in given]
    under_way.begin()
    try:
        output, mark = ops.clock.run(call, args, kwargs)
    except BaseException:
        under_way.end()
        raise
    peak_bytes = under_way.end()
    leaves = tree_leaves(output)
    record.outputs = tuple(under_way.output(leaf) for leaf in leaves)
    made = [value.storage for value in record.outputs if value is not None and value.storage.producer is record]
    for storage in made:
        if not storage.name:
            storage.name = state.named[storage.index] = state.next_name(COMPILED)
    record.name = made[0].name if made else state.next_name(COMPILED)
    note_writes()
    nodes = graphs_between([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], stops)
    # With several graphs, what the first ones saved is parked already when the last one runs.
    beyond = peak_bytes - under_way.made_bytes if len(nodes) == 1 else peak_bytes
    ops.temporary.append((record.index, max(0, beyond)))
    ops.add_compiled(record, mark, sequence)
    for node in nodes:
        _record_backward(state, record.name, node)
    return output


def _record_of(state: StepState, name: str, args: tuple, *, is_collective: bool = False) -> OpCall:
    return OpCall(
        index=state.ops.count,
        func="a compiled part",
        args=args,
        kwargs={},
        outputs=(),
        name=name,
        seconds=0.0,
        is_collective=is_collective,
    )


def _watch_writes(state: StepState, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """To be called when a compiled part has run: puts on record which of these it wrote into. Their versions tell."""
    local = [inside(tensor) for tensor in tensors if not tensor.is_inference()]
    versions = [(tensor, version_of(tensor)) for tensor in local if is_plain_or_fake(tensor)]
    find = state.storages.find
    if state.about_to_write is not None:
        for tensor, _ in versions:
            found = find(tensor)
            if found is not None and found.kind == "buffer":
                state.about_to_write(tensor.untyped_storage())

    def note() -> None:
        changed = [find(tensor) for tensor, version in versions if version_of(tensor) != version]
        for record in {id(found): found for found in changed if found is not None}.values():
            record.num_writes += 1

    return note


def _record_backward(state: StepState, name: str, node: Any) -> None:
    """See that the backward pass of one compiled graph is on record as one operator."""
    sequence = sequence_number(node)
    steps: list[Iterator[None]] = []

    def begin(gradients: Any) -> None:
        steps.append(_backward(state, f"{name}:backward", sequence))
        next(steps[-1])

    def end(given: Any, gradients: Any) -> None:
        with contextlib.suppress(StopIteration):
            steps.pop().send(given)  # type: ignore[attr-defined]

    node.register_prehook(begin)
    node.register_hook(end)


def _backward(state: StepState, name: str, sequence: int) -> Iterator[Any]:
    ops, call = state.ops, _record_of(state, name, ())
    clock: Any = ops.clock  # that of a fake step has no such calls, but there nothing is compiled
    state.storages.look_at_gathered()
    under_way = CompiledCall(state, call)
    under_way.begin()
    begun = clock.begin()
    peak_bytes, given = 0, None
    try:
        given = yield
    finally:
        mark = clock.end(begun)
        peak_bytes = under_way.end()
    for leaf in tree_leaves(given):
        value = under_way.output(leaf)
        if value is not None and not value.storage.name:
            value.storage.name = f"{name}#{value.storage.index}"
    ops.temporary.append((call.index, max(0, peak_bytes - under_way.made_bytes)))
    ops.add_compiled(call, mark, sequence)
