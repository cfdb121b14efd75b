"""Every operator that torch has samples of, under hooks that move what it saves.

What: torch's own database of operators (`op_db`) with its sample inputs. Each sample runs plain, and then in each of
some ways: `copied` packs a copy of the bytes and, once the forward is over, poisons what was saved; `swap`, `recompute`
and `solved` make a layer of the operator and put it under a plan. Gradients must be the same to the bit.

Cost: loading the database takes 8 s; all operators, float32, first samples, `copied`: some 10 s.
Not covered: operators that give no gradients, saved tensors without plain memory (sparse, subclasses): those stay.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import lowtide
from lowtide.engines.virtual import VirtualEngine
from tests.attack.draw import names_lowtide
from tests.attack.traces import tensor_bytes
from tests.solved import random_plan

WAYS = ("copied", "swap", "recompute", "solved")
EXPECTED = {
    (
        "nn.functional.rrelu",
        "copied",
    ): "its noise is filled after it was saved; plain checkpoints have it wrong as well",
}
_POISON = 0xFF


@dataclass
class Found:
    """What a sweep found."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By way and verdict."""
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    """Operator, way, what."""

    @property
    def unexpected(self) -> list[tuple[str, str, str]]:
        return [entry for entry in self.wrong if entry[:2] not in EXPECTED]

    def summary(self) -> str:
        lines = [f"{way:<10} {verdict:<14} {num}" for (way, verdict), num in sorted(self.counts.items())]
        lines += [f"{name} ({way}): {what}" for name, way, what in self.wrong]
        return "\n".join(lines)


def sweep(
    *,
    ways: Sequence[str] = WAYS,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.complex64, torch.bfloat16),
    num_samples: int = 4,
    part: slice = slice(None),
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Try the operators of `part` of the database with their first samples."""
    from torch.testing._internal.common_methods_invocations import op_db

    # Importing it forbids everybody in this process to set flags of torch.backends; other tests do.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

    found = Found()
    operators = op_db[part]
    for place, op in enumerate(operators):
        if place % 50 == 0:
            say(f"{place} of {len(operators)} operators, {len(found.unexpected)} wrong")
        for dtype in dtypes:
            if op.supports_autograd and op.supports_dtype(dtype, "cpu"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _try_operator(op, dtype, ways, num_samples, found)
    return found


def _try_operator(op: Any, dtype: torch.dtype, ways: Sequence[str], num_samples: int, found: Found) -> None:
    name = op.name if not op.variant_test_name else f"{op.name}.{op.variant_test_name}"
    functions = [op.op] if op.inplace_variant is None else [op.op, op.inplace_variant]
    for sample, function in itertools.product(islice(_samples(op, dtype), num_samples), functions):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        call = _Call(function, leaves, spec)
        try:
            truth = _gradients(call, call)
            again = _gradients(call, call)
        except Exception:
            continue
        if truth is None or truth != again:
            found.counts["plain", "no gradients" if truth is None else "unrepeatable"] += 1
            continue
        for way in ways:
            verdict = _try(call, way, truth)
            found.counts[way, verdict.partition(":")[0]] += 1
            if not verdict.startswith(("equal", "refused")):
                found.wrong.append((op.name, way, f"{name}, {dtype}: {verdict}"))


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    _seed()
    try:
        yield from op.sample_inputs("cpu", dtype, requires_grad=True)
    except Exception:
        return


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class _Call(nn.Module):
    """An operator with one sample, as a module of the sample's tensors."""

    def __init__(self, op: Callable, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.op, self.constants, self.spec = op, leaves, spec
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def tensors(self) -> list[Tensor]:
        """Fresh leaves."""
        given = [self.constants[place] for place in self.places]
        return [t.detach().clone().requires_grad_(t.requires_grad) for t in given]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            # Not the leaf itself: in-place operators would not take it, and a layer's input seldom is one.
            leaves[place] = tensor * 1 if tensor.requires_grad else tensor
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(first, *args, **kwargs)


class _Net(nn.Module):
    """A model with one layer."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.layers = nn.ModuleList([call])
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *tensors: Tensor) -> Any:
        return self.layers[0](*tensors)


def _gradients(call: _Call, run: Callable[..., Any], settle: Callable[[list[Any]], None] | None = None) -> Any:
    """The bytes of all gradients, or None where there are none."""
    tensors = call.tensors()
    _seed()
    outputs = [leaf for leaf in tree_leaves(run(*tensors)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs or not wanted:
        return None
    if settle is not None:
        settle([*tensors, *outputs])
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs]
    gradients = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    return [None if gradient is None else tensor_bytes(gradient) for gradient in gradients]


def _try(call: _Call, way: str, truth: Any) -> str:
    try:
        got = _copied(call) if way == "copied" else _planned(call, way)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return f"refused: {text}" if names_lowtide(error) else f"crash: {text}"
    if got == truth:
        return "equal"
    return "silently wrong" if isinstance(got, list) else str(got)


class _Copy:
    """The bytes of a saved tensor's storage, as they were when it was saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage().clone()
        self.empty = torch.empty(0, dtype=tensor.dtype)
        self.view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()

    def open(self) -> Tensor:
        result = self.empty.clone().set_(self.storage.clone(), *self.view)
        result = result.conj() if self.is_conj else result
        return torch._neg_view(result) if self.is_neg else result


def _copied(call: _Call) -> Any:
    saved: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor._is_zerotensor():
            return tensor
        saved.append(tensor.untyped_storage())
        return _Copy(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed.open() if isinstance(packed, _Copy) else packed

    def settle(alive: list[Any]) -> None:
        known = {leaf.untyped_storage()._cdata for leaf in alive if leaf.layout is torch.strided}
        for storage in saved:
            if storage._cdata not in known and storage._cdata not in constants:
                storage.fill_(_POISON)

    constants = {
        leaf.untyped_storage()._cdata
        for leaf in call.constants
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    }
    with saved_tensors_hooks(pack, unpack):
        return _gradients(call, call, settle)


def _planned(call: _Call, way: str) -> Any:
    net, memory = _Net(call), {"min_bytes": 0, "layers": ["layers.0"]}
    if way == "solved":
        tensors = call.tensors()
        _seed()
        profile = lowtide.observe(net, tuple(tensors), loss=_total)
        plan: Any = random_plan(profile, 0, made=1.0, swapped=0.5)
    else:
        plan = {**memory, way: "all"}
    engine = VirtualEngine(0)
    with lowtide.apply(net, plan, engine=engine):
        for _ in range(2):
            got = _gradients(call, net)
    return got if not engine.violations else f"broken: {engine.violations[0]}"


def _total(output: Any) -> Tensor:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    leaves = [leaf if leaf.layout is torch.strided else leaf.to_dense() for leaf in leaves]
    return torch.stack([(leaf.abs() if leaf.is_complex() else leaf).double().sum() for leaf in leaves]).sum()
