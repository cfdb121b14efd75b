"""One recorded forward pass with everything kept aside: the truth that recipes are compared with.

What: `record` runs a loss under a dispatch mode and gives the graph of its operators, its nodes in order of saving, and
a copy of the bytes that each node held when it was saved. Every tensor is held until the recording is dropped, so
addresses are unique and nothing is ever mistaken for something else. For small models only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.core.recipe import Geometry
from lowtide.profiling.producer_names import op_name
from lowtide.recipes.build import Target
from lowtide.recipes.graph import OpCall, Storage, Value
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.wrappers import is_desugared

_COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass
class Recording:
    """What one forward pass did."""

    calls: list[OpCall] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    bits: dict[str, Tensor] = field(default_factory=dict)
    """Bytes of each node when it was saved, by name."""
    retained_inputs: set[str] = field(default_factory=set)
    """Names of the nodes that autograd does not save."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers by name."""

    def input(self, kind: str, name: str, geometry: Geometry) -> Tensor:
        """A tensor on a node's true bytes, or on a parameter or buffer."""
        storage = (self.bits[name].clone() if kind == "node" else self.tensors[name]).untyped_storage()
        empty = torch.empty(0, dtype=getattr(torch, geometry.dtype))
        return empty.set_(storage, geometry.offset, geometry.size, geometry.stride)


class _Mode(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self.storages: dict[int, Storage] = {}
        self.held: list[Any] = []
        self.path = [""]
        self.names: dict[str, int] = {}
        self.saved: dict[int, tuple] = {}
        self.caught: dict[int, tuple] = {}
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                self.recording.tensors[name] = tensor
                self.add(tensor, name, kind)

    def add(self, tensor: Tensor, name: str, kind: str, producer: OpCall | None = None) -> Storage:
        self.held.append(tensor.detach())
        storage = tensor.untyped_storage()
        note = Storage(len(self.storages), storage.nbytes(), tensor.dtype, name, kind, producer)
        note.born = -1 if producer is None else producer.index
        return self.storages.setdefault(storage._cdata, note)

    def find(self, tensor: Tensor) -> Storage:
        key = tensor.untyped_storage()._cdata
        return self.storages[key] if key in self.storages else self.add(tensor, self.name("unknown"), "unknown")

    def value(self, tensor: Tensor) -> Value | None:
        if tensor.layout is not torch.strided:
            return Value(Storage(-1, 0, tensor.dtype, "", "unknown"), 0, (), (), 0, tensor.dtype, tensor.device, False)
        is_odd = tensor.is_conj() or tensor.is_neg() or not is_plain(tensor)
        storage = self.find(tensor)
        look = (tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())
        return Value(storage, storage.num_writes, *look, tensor.dtype, tensor.device, not is_odd)

    def name(self, op: str) -> str:
        full = f"{self.path[-1]}.{op}" if self.path[-1] else op
        number = self.names[full] = self.names.get(full, -1) + 1
        return f"{full}_{number}" if number else full

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        noted_args, noted_kwargs = tree_map_only(Tensor, self.value, (args, kwargs))
        start = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        name = self.name(op_name(func.overloadpacket.__name__))
        call = OpCall(
            len(self.recording.calls), func, noted_args, noted_kwargs, (), name, seconds,
            func.namespace in _COLLECTIVES,
        )  # fmt: skip
        self.recording.calls.append(call)
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if func is torch.ops.aten.native_batch_norm.default and args[5]:
            written += args[3:5]  # the running statistics: its schema does not say so
        for given in written:
            for storage in {id(s): s for s in map(self.find, _tensors(given))}.values():
                storage.num_writes += 1
        outputs: list[Value | None] = []
        for number, leaf in enumerate(tree_leaves(out)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                if leaf.untyped_storage()._cdata not in self.storages:
                    self._add_made(leaf, f"{name}:{number}" if number else name, call)
                outputs.append(self.value(leaf))
            else:
                outputs.append(None)
        call.outputs = tuple(outputs)
        self.held.append(out)
        return out

    def _add_made(self, tensor: Tensor, name: str, call: OpCall) -> None:
        sources = [leaf.storage for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Value)]
        storage = self.add(tensor, name, "made", call)
        is_cast = op_name(call.func.overloadpacket.__name__) == "to"
        storage.is_parameter_cast = bool(
            is_cast and sources and all(s.kind == "parameter" or s.is_parameter_cast for s in sources)
        )

    def note(self, table: dict[int, tuple], tensor: Tensor) -> None:
        """A hook ran on a tensor: the first one of its storage counts."""
        with _disable_current_modes():
            self._note(table, tensor)

    def _note(self, table: dict[int, tuple], tensor: Tensor) -> None:
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return
        storage = self.find(tensor)
        if storage.index in table or storage.kind in ("parameter", "buffer") or storage.is_parameter_cast:
            return
        value = self.value(tensor)
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
        table[storage.index] = (len(self.recording.calls) - 1, len(table), value, raw.clone())

    def finish(self, model: nn.Module) -> Recording:
        now = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for storage in self.storages.values():
            # A buffer that the forward replaced is not found by its name later.
            if storage.kind == "buffer" and id(self.recording.tensors[storage.name]) not in now:
                storage.kind = "unknown"
        nodes = [(*entry, False) for entry in self.saved.values()]
        nodes += [(*entry, True) for index, entry in self.caught.items() if index not in self.saved]
        for _, _, value, bits, is_retained_input in sorted(nodes, key=lambda node: (node[0], node[4], node[1])):
            storage = value.storage
            self.recording.targets.append((storage, value.version))
            self.recording.bits[storage.name] = bits
            if is_retained_input:
                self.recording.retained_inputs.add(storage.name)
        return self.recording


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def record(
    model: nn.Module,
    loss: Callable[[], Tensor],
    inputs: Any = (),
    *,
    catches: Callable[[str], bool] = lambda name: True,
    sees_all: bool = False,
) -> Recording:
    """One forward pass of `loss`. `catches(module name)`: whether its inputs and outputs may be retained inputs.
    `sees_all`: every storage is a node, as if autograd had saved it when the pass was over."""
    mode = _Mode(model)
    for tensor in _tensors(inputs):
        mode.add(tensor, mode.name("input"), "input")
    hooks = []

    def follow(name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            mode.path.append(name)
            if catches(name):
                for tensor in _tensors((args, kwargs)):
                    mode.note(mode.caught, tensor)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            mode.path.pop()
            if catches(name):
                for tensor in _tensors(output):
                    mode.note(mode.caught, tensor)

        hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))

    for name, module in model.named_modules():
        follow(name, module)

    def pack(tensor: Tensor) -> Tensor:
        mode.note(mode.saved, tensor)
        return tensor

    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor), mode:
            out = loss()
    finally:
        for hook in hooks:
            hook.remove()
    mode.held.append(out)
    if sees_all:
        for tensor in _tensors(mode.held):
            mode.note(mode.saved, tensor)
    recording = mode.finish(model)
    recording.held = mode.held  # type: ignore[attr-defined]
    return recording


class Collectives(TorchDispatchMode):
    """Counts the collectives that are issued, but those of the names in `skipped`."""

    def __init__(self, skipped: Collection[str] = ()) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._skipped = skipped

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_desugared(types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and "wait" not in name and "wrap" not in name and name not in self._skipped:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
