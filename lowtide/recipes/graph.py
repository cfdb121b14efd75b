"""The operators of one observed step, as a graph of values on storages; and what an operator reads and writes.

What: the recorder (profiling/step_recorder.py) writes one `OpCall` for each operator that ran and one `Storage` for
each block of bytes that it saw; the recipe builder (build.py) reads them. Nothing here holds a tensor: a `Value` says
how a tensor viewed a storage, and at which version. So the graph of a step costs no device memory.

`index_limit` says below what the indices are that a max-pool, a sort or a maximum over one dimension gives out: places
in the plane or the dimension that it looked at. It follows from the operator's definition and not from values, so int64
indices may be stored in fewer bytes without a look at them (tensors/codecs.py), on an accelerator too.

What an operator reads and writes comes from its schema, and where the schema does not say, from here. A recipe may run
one again only if all that it reads can be given to it and all that it writes is the recipe's own. Three things are not
in a schema: batch norms update running statistics, the older kind of collectives (`c10d`) writes into what it is given,
and freshly allocated memory (`empty`) holds what was there before: what is written to it since is not followed.

Cost: a walk over the arguments of one call. Not covered: side effects outside of tensors; what the numbers were;
limits of indices that something wrote to after they were made, of masked or shifted ones, and of those that came with
the batch (token ids): they may be others in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.tensors.private import OpOverload, schema_of

_PLANES = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
    "fractional_max_pool2d": 2,
    "fractional_max_pool3d": 3,
}
"""How many of the last dimensions a place is counted in."""
_OVER_ONE = frozenset({"sort", "topk", "kthvalue", "mode", "median", "nanmedian", "max", "min", "cummax", "cummin"})
"""Those whose second result is a place in the dimension `dim`."""


def index_limit(storage: Storage) -> int | None:
    """One more than the largest index that the operator which made a storage can give; None where it gives others."""
    call = storage.producer
    if call is None or storage.num_writes or len(call.outputs) < 2:
        return None
    indices, source = call.outputs[1], call.args[0] if call.args else None
    if indices is None or indices.storage is not storage or not isinstance(source, Value) or not source.size:
        return None
    name = call.func.overloadpacket.__name__
    if name in _PLANES:
        return math.prod(source.size[-_PLANES[name] :])
    dim = call.argument("dim") if name in _OVER_ONE else None
    return source.size[dim] if isinstance(dim, int) else None


@dataclass(slots=True)
class Storage:
    """One block of bytes, from its first sight to its death. Addresses are reused; indices are not."""

    index: int
    nbytes: int
    dtype: torch.dtype
    """Of the first tensor seen on it."""
    name: str
    """`model.layers.3.mlp.mul`; unique within the step. Of parameters and buffers: their dotted name."""
    kind: str
    """'made' by an operator, 'parameter', 'buffer', 'input' (there before the step), 'replaced' (a buffer when the
    step began, whose name means another tensor since), 'unknown' (first seen as an argument: something made it that
    the dispatch mode did not see)."""
    producer: OpCall | None = None
    born: int = -1
    """Index of the operator that made it; -1 if it was there before the step."""
    dies: int | None = None
    """Index of the first operator that ran after its memory was freed; None while it lives."""
    num_writes: int = 0
    """In-place writes after it was made."""
    is_parameter_cast: bool = False
    """A cast or copy of parameters only: not an activation."""
    is_gathered: bool = False
    """A parameter that FSDP2 gathers for a while: the storage is empty at other times."""


@dataclass(slots=True, frozen=True)
class Value:
    """A tensor, without the tensor."""

    storage: Storage = field(repr=False)
    version: int
    """`storage.num_writes` when it was seen."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_plain: bool = True
    """False for conjugate or negative views and for tensor subclasses: those take no part in recipes."""


@dataclass(slots=True)
class OpCall:
    """One operator that ran. In `args` and `kwargs` every tensor is replaced by its `Value`."""

    index: int
    func: Any
    """A `torch._ops.OpOverload`; of a compiled part a text."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value | None, ...]
    """The flattened outputs; None for what is no tensor."""
    name: str
    seconds: float
    is_collective: bool
    temporary_bytes: int = 0
    """What it held while it ran, beyond what it was given and gave out; 0 where that is not counted."""
    has_drawn: bool = False
    """A random state moved while it ran; looked at where the operator is not torch's own, whose tags may be missing."""

    def argument(self, name: str) -> Any:
        """The argument that the operator's schema calls `name`, or its default; None if the schema has none."""
        for place, argument in enumerate(schema_of(self.func).arguments):
            if argument.name == name:
                return self.kwargs.get(name, self.args[place] if place < len(self.args) else argument.default_value)
        return None


# -- what an operator reads and writes ---------------------------------------------------------------------------------


_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
# The statistics are no input of what these compute in training mode, so they may be left out of a second run.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_RUNNING_STATISTICS = slice(3, 5)
_TRAINING = 5
# oneDNN's LSTM keeps a workspace for its backward, and gives none at all without gradients. The table of a CTC loss has
# places that no alignment reaches.
_WORKSPACES = frozenset({"mkldnn_rnn_layer", "_ctc_loss"})


# Collectives that give out one new tensor and name their group by a string.
_REPEATABLE = frozenset(
    {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast"}
)
WAIT = "_c10d_functional.wait_tensor.default"
"""What stands between a functional collective and its first reader."""


def leaves_bytes_unset(call: OpCall) -> bool:
    """Whether some bytes of what it gives are what the memory held before: no second run gives the same."""
    return packet_name(call) in _WORKSPACES


def is_repeatable(call: OpCall) -> bool:
    """Whether a recipe can issue this collective again."""
    is_functional = call.func.namespace == "_c10d_functional" and not schema_of(call.func).is_mutable
    return is_functional and packet_name(call) in _REPEATABLE


def writes_unsaid(call: OpCall) -> bool:
    """Whether the call writes into those tensors that it also gives out, although its schema does not say so."""
    return call.func.namespace == "c10d"


def is_wait(call: OpCall) -> bool:
    """Whether the call waits for a functional collective. It gives out the tensor that it was given."""
    return str(call.func) == WAIT


def packet_name(call: OpCall) -> str:
    """`mul` of `aten.mul.Tensor`; empty for what is no operator overload."""
    return call.func.overloadpacket.__name__ if isinstance(call.func, OpOverload) else ""


def read_values(call: OpCall) -> Iterator[Value]:
    """The tensors that a recipe must give to the operator."""
    return (leaf for leaf in _leaves((pure_args(call), *call.kwargs.values())) if isinstance(leaf, Value))


def _leaves(given: Any) -> Iterator[Any]:
    """What is in lists and tuples. (torch's pytree does the same for any container, ten times slower.)"""
    if not isinstance(given, (list, tuple)):
        yield given
        return
    for item in given:
        yield from _leaves(item)


def pure_args(call: OpCall) -> Sequence[Any]:
    """The positional arguments of a run that changes nothing but its results and what is written in place."""
    if not updated_statistics(call.func, call.args):
        return call.args
    args = [*call.args]
    args[_RUNNING_STATISTICS] = [None, None]
    return args


def has_statistics(func: Any) -> bool:
    """Whether the operator may update running statistics that it is given."""
    return isinstance(func, OpOverload) and func.overloadpacket.__name__ in _BATCH_NORMS


def updated_statistics(func: Any, args: Sequence[Any]) -> list[Any]:
    """The running statistics that a batch norm with these arguments writes to, although its schema does not say so."""
    if not has_statistics(func) or not args[_TRAINING]:
        return []
    return [given for given in args[_RUNNING_STATISTICS] if given is not None]


def is_random(call: OpCall) -> bool:
    """Whether the call drew random numbers. Attention kernels are marked as random; without dropout they are not."""
    is_marked = isinstance(call.func, OpOverload) and torch.Tag.nondeterministic_seeded in call.func.tags
    return call.has_drawn or (is_marked and call.argument("dropout_p") != 0.0)


def written_values(call: OpCall) -> list[Value]:
    """The tensors that the operator writes into in place."""
    statistics = updated_statistics(call.func, call.args)
    if statistics:
        return statistics
    if not isinstance(call.func, OpOverload):
        return []
    if writes_unsaid(call):
        given_out = {value.storage.index for value in call.outputs if value is not None}
        return [value for value in read_values(call) if value.storage.index in given_out]
    if not schema_of(call.func).is_mutable:
        return []
    written: list[Value] = []
    for position, argument in enumerate(schema_of(call.func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
        written += [leaf for leaf in _leaves(given) if isinstance(leaf, Value)]
    return written


def is_empty(storage: Storage) -> bool:
    """Whether it was allocated without values."""
    return storage.producer is not None and packet_name(storage.producer) in _EMPTY


def shows_all(storage: Storage) -> bool:
    """Whether what the operator that made it gave out covers all of it. Else the rest may be what the memory held
    before: `mse_loss` adds up a block of which its result is the first number."""
    given = storage.producer.outputs if storage.producer is not None else ()
    shown = [math.prod(v.size) * v.dtype.itemsize for v in given if v is not None and v.storage is storage]
    return sum(shown) >= storage.nbytes


def has_numbers(call: OpCall) -> bool:
    """Whether a number, or a view that a number may have chosen, is among the arguments."""
    for leaf in _leaves((call.args, *call.kwargs.values())):
        if type(leaf) in (int, float):
            return True
        if isinstance(leaf, Value) and math.prod(leaf.size) * leaf.dtype.itemsize != leaf.storage.nbytes:
            return True
    return False
