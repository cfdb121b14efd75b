"""Every operator that torch has samples of, under hooks that move what it saves, and by recipe.

What: torch's own database of operators (`op_db`) with its sample inputs. Each sample runs plain, and then in each of
some ways. `copied` packs a copy of the bytes and, once the forward is over, overwrites what was saved. `virtual` and
`host` make a layer of the operator and swap all that it saves, on these engines: once the copies are complete, whatever
is left of their sources is overwritten. `recompute` and `solved` put the layer under such a plan. Gradients must be the
same to the bit. `recipes` asks for no gradients: of each storage that an operator makes, the recipe, if one is built,
must give the same bytes, from its neighbours and from the inputs of the sample.

Why it would notice: the C library fills what it allocates and frees (`M_PERTURB`), with other bytes each time. So bytes
that are read too late, or were never written, are other bytes.

Cost: loading the database takes 2 to 8 s; all operators, float32, first samples: 1 s `copied`, 3 to 8 s each other way.
Not covered: saved tensors without plain memory (sparse, subclasses): those stay. What is left out, and why, is in
`Found.left_out`.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import lowtide
from lowtide.core.recipe import Recipe
from lowtide.engines.base import Slot
from lowtide.engines.host import HostEngine
from lowtide.recipes.build import build_recipes
from lowtide.recipes.execute import CompiledRecipe
from tests.attack.draw import names_lowtide
from tests.attack.traces import tensor_bytes
from tests.support.recording import record
from tests.support.solved import random_plan
from tests.support.virtual_engine import VirtualEngine

WAYS = ("copied", "virtual", "host", "recompute", "solved", "recipes")
_MISLED = "torch gives other numbers under a dispatch mode if they are complex; lowtide refuses it"
EXPECTED = {
    (
        "nn.functional.rrelu",
        "copied",
    ): "its noise is filled after it was saved; plain checkpoints have it wrong as well",
    ("pinverse", "recipes"): _MISLED,
    ("linalg.pinv", "recipes"): _MISLED,
    ("linalg.lstsq", "recipes"): _MISLED,
}
"""Operators that differ in one of the ways, and why that is no fault of lowtide's."""
_POISON = 0xFF
_M_PERTURB = -6
"""Of the C library's `mallopt`."""


@dataclass
class Found:
    """What a sweep found."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By way and verdict."""
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    """Operator, way, what."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Operators and in-place variants of which no sample was compared with plain gradients, and why."""
    without_recipe: dict[str, str] = field(default_factory=dict)
    """Those of which no storage has a recipe, and why."""

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
    is_largest_only: bool = False,
    part: slice = slice(None),
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Try the operators of `part` of the database with their first samples; or with the largest of these only, the last
    one of its size, which is seldom the one where all is left out that may be."""
    from torch.testing._internal.common_methods_invocations import op_db

    # Importing it forbids everybody in this process to set flags of torch.backends; other tests do.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

    operators = op_db[part]
    with contextlib.ExitStack() as stack:
        engine = _Watched(HostEngine()) if "host" in ways else None
        if engine is not None:
            stack.callback(engine.close)
        stack.callback(_perturb, 0)
        run = _Sweep(ways, num_samples, is_largest_only, engine)
        for place, op in enumerate(operators):
            if place % 50 == 0:
                say(f"{place} of {len(operators)} operators, {len(run.found.unexpected)} wrong")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for dtype in dtypes:
                    _try_operator(run, op, dtype)
    return run.found


@dataclass(frozen=True)
class _Sweep:
    """What all operators share."""

    ways: Sequence[str]
    num_samples: int
    is_largest_only: bool
    engine: _Watched | None
    """The host engine, where one of the ways asks for it."""
    found: Found = field(default_factory=Found)


def _try_operator(run: _Sweep, op: Any, dtype: torch.dtype) -> None:
    name = op.name if not op.variant_test_name else f"{op.name}.{op.variant_test_name}"
    functions = {name: op.op} if op.inplace_variant is None else {name: op.op, f"{name}_": op.inplace_variant}
    found = run.found
    if not op.supports_dtype(dtype, "cpu"):
        found.left_out.update(dict.fromkeys(functions, "has no such dtype"))
        return
    has_gradients = op.supports_autograd
    samples = list(islice(_samples(op, dtype, has_gradients), run.num_samples))
    if run.is_largest_only:
        samples = sorted(samples, key=_num_elements)[-1:]
    for called, function in functions.items():
        reasons = []
        for sample in samples:
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            call = _Call(called, function, leaves, spec)
            truth, reason = _truth(call) if has_gradients else (None, "has no gradients")
            reasons.append(reason)
            for way in run.ways:
                verdict = _try(run, call, way, truth)
                found.counts[way, verdict.partition(":")[0]] += 1
                if not verdict.startswith(("equal", "refused", "nothing")):
                    found.wrong.append((op.name, way, f"{called}, {dtype}: {verdict}"))
        if all(reasons):
            found.left_out[called] = reasons[0] if reasons else "has no samples"


def _truth(call: _Call) -> tuple[Any, str]:
    """The gradients of a plain run; or None, and why they cannot be compared."""
    try:
        truth = _gradients(call, call)
        again = _gradients(call, call)
    except Exception as error:
        return None, f"plain fails: {type(error).__name__}"
    if truth is None:
        return None, "no output needs gradients"
    return (truth, "") if truth == again else (None, "does not repeat itself")


def _samples(op: Any, dtype: torch.dtype, has_gradients: bool) -> Iterator[Any]:
    _seed()
    try:
        yield from op.sample_inputs("cpu", dtype, requires_grad=has_gradients)
    except Exception:
        return


def _num_elements(sample: Any) -> int:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _perturb(byte: int) -> None:
    """What the C library allocates from now on is full of the other bits, what it frees of these; 0: as usual."""
    ctypes.CDLL(None).mallopt(_M_PERTURB, byte)


class _Call(nn.Module):
    """An operator with one sample, as a module of the sample's tensors."""

    def __init__(self, name: str, op: Callable, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.name, self.op, self.constants, self.spec = name, op, leaves, spec
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def tensors(self) -> list[Tensor]:
        """Fresh leaves."""
        given = [self.constants[place] for place in self.places]
        return [t.detach().clone().requires_grad_(t.requires_grad) for t in given]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            # Not the leaf itself: in-place operators would not take it, and the caller holds it.
            leaves[place] = tensor * 1 if tensor.requires_grad else tensor.clone()
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


def _gradients(call: _Call, run: Callable[..., Any], settle: Callable[[], None] | None = None) -> Any:
    """The bytes of all gradients, or None where there are none."""
    tensors = call.tensors()
    _seed()
    # Times one: what the operator gave out is held by autograd only.
    outputs = [leaf * 1 for leaf in tree_leaves(run(*tensors)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs or not wanted:
        return None
    if settle is not None:
        settle()
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs]
    gradients = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    return [None if gradient is None else tensor_bytes(gradient) for gradient in gradients]


def _try(run: _Sweep, call: _Call, way: str, truth: Any) -> str:
    if way != "recipes" and truth is None:
        return "nothing"
    try:
        if way == "recipes":
            return _by_recipes(call, run.found)
        engine = run.engine if way == "host" else _Watched(VirtualEngine(0))
        got = _copied(call) if way == "copied" else _planned(call, way, run.found, engine)
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

    def settle() -> None:
        for storage in saved:
            storage.fill_(_POISON)

    with saved_tensors_hooks(pack, unpack):
        return _gradients(call, call, settle)


class _Watched:
    """An engine that remembers what it copied away."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._sources: list[StorageWeakRef] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        self._sources.append(StorageWeakRef(source))
        self._engine.copy_out(source, slot)

    def forget(self) -> tuple[int, int]:
        """How many storages were copied away, and how many of them are still held; the C library has overwritten the
        others."""
        num_held = sum(not source.expired() for source in self._sources)
        num_copied = len(self._sources)
        self._sources.clear()
        return num_copied, num_held


def _planned(call: _Call, way: str, found: Found, engine: Any) -> Any:
    net, memory = _Net(call), {"min_bytes": 0, "layers": ["layers.0"]}
    if way == "solved":
        tensors = call.tensors()
        _seed()
        profile = lowtide.observe(net, tuple(tensors), loss=_total)
        plan: Any = random_plan(profile, 0, made=1.0, swapped=0.5)
    else:
        plan = {**memory, "recompute" if way == "recompute" else "swap": "all"}

    def settle() -> None:
        tide.settle()
        num_copied, num_held = engine.forget()
        found.counts[way, "(copied)"] += num_copied
        found.counts[way, "(held)"] += num_held

    _perturb(_POISON)
    with lowtide.apply(net, plan, engine=engine) as tide:
        # The first forward is watched operator by operator, the second goes by what that has shown.
        steps = [_gradients(call, net, settle) for _ in range(2)]
        found.counts[way, "(recomputed)"] += tide.stats.recomputed_bytes > 0
        failed = tide.failed_recipes
    problems = [*getattr(engine, "violations", ()), *(f"the recipe of {name}: {why}" for name, why in failed.items())]
    if steps[0] != steps[1]:
        problems.append("the first step gave other gradients than the second")
    return f"broken: {problems[0]}" if problems else steps[1]


def _by_recipes(call: _Call, found: Found) -> str:
    net = _Net(call)
    _seed()
    _perturb(0x55)
    try:
        recording = record(net, lambda: net(*tensors), tensors := call.tensors(), sees_all=True)
    except Exception as error:
        found.without_recipe[call.name] = f"plain fails: {type(error).__name__}"
        return "nothing"
    _perturb(0xAA)
    # What the sample's own tensors were copied to, by one operator each, before the operator ran.
    given = [(s, version) for s, version in recording.targets if s.born < len(tensors) and not version]
    made = [target for target in recording.targets if target not in given]
    reasons, number = {"it makes no storage": 0}, 0
    for targets in (recording.targets, [*given, *made[-1:]]):
        recipes = build_recipes(recording.calls, targets)
        for storage, _ in made if targets is recording.targets else made[-1:]:
            recipe = recipes[storage.index]
            if not isinstance(recipe, Recipe):
                reasons[recipe] = 1
                continue
            inputs = [recording.input(entry.kind, entry.name, entry.geometry) for entry in recipe.inputs]
            result = CompiledRecipe(recipe).run(inputs, torch.device("cpu")).untyped_storage()
            number += 1
            if not torch.equal(torch.empty(0, dtype=torch.uint8).set_(result), recording.bits[storage.name]):
                return f"silently wrong: the recipe of {storage.name}: {[step.op for step in recipe.steps]}"
    if number == 0:
        found.without_recipe[call.name] = list(reasons)[-1]
    found.counts["recipes", "(made)"] += number
    return "equal" if number else "nothing"


def _total(output: Any) -> Tensor:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    leaves = [leaf if leaf.layout is torch.strided else leaf.to_dense() for leaf in leaves]
    return torch.stack([(leaf.abs() if leaf.is_complex() else leaf).double().sum() for leaf in leaves]).sum()
