"""What is on the device whatever the fates: parameters, gradients, optimizer state, and what a step of it needs; what
an allocator rounds up, and what others hold.

What: bytes of unique storages. An optimizer that has not stepped yet has no state; a copy of it takes two steps on fake
parameters (shapes without memory), and what it made is counted. Its state between steps and its temporaries come out.
Of the state, what may be elsewhere between steps is counted too: tensors of 16,384 elements and more, not `step` and
what else is small; and the most of it that must be there at once: of a parameter that may be stepped in stretches, the
state of a shortest one.
Temporaries are those of all parameters where the optimizer steps a list of them, and of the largest where it steps one
after the other: a second step, of the parameter with the most state alone, tells the two apart.
The optimizer itself is never written to: what wraps it is taken off first (optimizers.py), nothing is assigned by name
to its copy, and what the two share is as it was afterwards.

Cost: two steps of the optimizer on fake tensors, about 0.2 ms a parameter, and two of a single parameter. Not covered:
optimizers that look at values (they cannot run without them), and such as hold other optimizers, whose step would step
those: for these the state that exists is counted, and a warning says so.

Rounding: allocators hand out blocks in multiples of a grain (512 bytes on CUDA) and count them so. A plan is made for
bytes of storages, and its budget is held against the allocator's count. `grain_of` finds the grain by asking for one
byte; `rounding_bytes` bounds what all of it comes to at any moment of a step: each storage of the observed step takes
up to one grain more than its bytes. That step keeps everything that any plan keeps, so the most of it at any operator
is a bound for every plan. Gradients and the optimizer's state are beside it: each parameter has one gradient, and up to
four tensors of state or of the optimizer's temporaries. `fingerprint_bytes` is lowtide's own part: what a recipe makes
is compared with a fingerprint of what was dropped, which is on the device. `foreign_bytes` is what the allocator has
given out when a model is first observed, less the blocks of what is known: batches that were put there before, a second
model, results that the loop holds. Not covered: what an allocator gives out beyond its grain (CUDA leaves up to 1 MiB
of a large block unsplit), which is measured and corrected (runtime/autopilot/measure.py); what comes to the device
later; devices whose allocator does not count.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.core.profile import StateBytes, byte_curve
from lowtide.recipes.graph import Storage
from lowtide.tensors.fsdp import is_sharded, local_part
from lowtide.tensors.kinds import swapped_weights_of
from lowtide.tensors.live_bytes import LiveBytes, optimizer_tensors, plain_parts, unique_bytes
from lowtide.tensors.optimizers import (
    CUT_ELEMENTS,
    SWAP_ATTRIBUTE,
    bare,
    bare_step,
    is_alike_in_stretches,
    parameters_of,
)
from lowtide.tensors.private import (
    OPTIMIZER_HOOKS,
    OPTIMIZER_STATE_HOOKS,
    FakeTensorMode,
    storage_key,
    tree_leaves,
    unset_fake_temporarily,
)
from lowtide.tensors.remembered import slots_of
from lowtide.tensors.snapshot import take

MOVABLE_ELEMENTS = 16_384
"""Smaller tensors of an optimizer's state stay where it put them: a copy is not worth its start."""
_NUM_STEPS = 2
_MOST_GRAIN = 4096
_NUM_PROBES = 8
_OPTIMIZER_TENSORS = 4
# Of a fingerprint, and of flags for many of them.
_WORDS_BYTES = 256
_FLAGS_BYTES = 512
_WEIGHTS_BYTES = 4096


def state_bytes(
    model: nn.Module,
    *,
    inputs: int,
    optimizer: torch.optim.Optimizer | None,
    device_type: str | None,
    is_accelerator: bool,
) -> StateBytes:
    """The account of `model` and `optimizer`. `inputs` are the batch's bytes; `is_accelerator` says how the optimizer
    would run (torch's own run over all parameters at once there)."""
    parameters = list(model.parameters())
    known = {id(p) for p in parameters}
    weights = swapped_weights_of(model)
    moved = [p for p in parameters if weights is not None and weights.is_planned and weights.moves(p)]
    away = set(moved)
    # Plans say how much of what comes and goes is there.
    held = unique_bytes([p for p in parameters if p not in away], device_type) + sum(p.nbytes for p in moved)
    return dataclasses.replace(
        _optimizer_bytes(optimizer, is_accelerator),
        parameters=held,
        buffers=unique_bytes([*parameters, *(b for b in model.buffers() if id(b) not in known)], device_type)
        - unique_bytes(parameters, device_type),
        gradients=sum(_gradient_bytes(p) for p in parameters if p.requires_grad),
        inputs=inputs,
    )


def _gradient_bytes(parameter: nn.Parameter) -> int:
    if is_sharded(parameter):
        return local_part(parameter).untyped_storage().nbytes()  # padded, as the gradient is
    return parameter.numel() * parameter.element_size()


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None, is_accelerator: bool) -> StateBytes:
    if optimizer is None:
        return StateBytes()
    optimizer = bare(optimizer)
    try:
        return _dry_run(optimizer, is_accelerator)
    except Exception as error:  # an optimizer is anybody's code
        warnings.warn(
            f"{type(optimizer).__name__} cannot step without values ({type(error).__name__}): only the state that it "
            "has now is counted; take one step first if it has none",
            stacklevel=4,
        )
        return _state_of(optimizer, _in_stretches(optimizer, is_accelerator))[0]


def _state_of(optimizer: torch.optim.Optimizer, in_stretches: set[int]) -> tuple[StateBytes, tuple[int, int]]:
    """The state that there is; and of the parameter with the most of it that can move: the bytes of that, and its
    number. `in_stretches`: numbers of the parameters that may be stepped so."""
    number_of = {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}
    movable: list[torch.Tensor] = []
    unit, largest = 0, (0, 0)
    for parameter, state in optimizer.state.items():
        large = [
            leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and leaf.numel() >= MOVABLE_ELEMENTS
        ]
        movable += large
        nbytes = unique_bytes(large)
        largest = max(largest, (nbytes, number_of.get(id(parameter), 0)))
        num_elements = local_part(parameter).numel() if isinstance(parameter, torch.Tensor) else 0
        if number_of.get(id(parameter)) in in_stretches and num_elements > CUT_ELEMENTS:
            nbytes = -(-nbytes * CUT_ELEMENTS // num_elements)
        unit = max(unit, nbytes)
    nbytes = unique_bytes(optimizer_tensors(optimizer))
    return StateBytes(optimizer=nbytes, optimizer_movable=unique_bytes(movable), optimizer_unit=unit), largest


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list({id(p): p for p in parameters_of(optimizer)}.values())


def _in_stretches(optimizer: torch.optim.Optimizer, is_accelerator: bool) -> set[int]:
    """Numbers of the parameters that may be stepped in stretches, as optimizer/buckets.py decides."""
    number_of = {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}
    return {
        number_of[id(parameter)]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if is_alike_in_stretches(optimizer, group, parameter, is_accelerator=is_accelerator)
    }


def _dry_run(optimizer: torch.optim.Optimizer, is_accelerator: bool) -> StateBytes:
    """The state after steps of a copy on fake parameters, and the most that they needed beyond."""
    devices = {parameter.device for parameter in _parameters(optimizer)}
    before = take(beside=optimizer, called=True, devices=devices)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            twin, fakes = _twin(optimizer, is_accelerator)
            temporaries = _temporaries(twin, fakes)
            state, largest = _state_of(twin, _in_stretches(optimizer, is_accelerator))
            share = _share_at_once(optimizer, is_accelerator, state.optimizer_movable, largest, temporaries)
            return dataclasses.replace(state, optimizer_temporaries=temporaries, optimizer_share_at_once=share)
    finally:
        before.restore()  # what the copy shares with the original: objects of the optimizer's own class


def _temporaries(twin: torch.optim.Optimizer, fakes: list[nn.Parameter]) -> int:
    """The most that a step needs beyond parameters, gradients and state: of the first two, since the first one has no
    state of later groups yet."""
    there = [*fakes, *(p.grad for p in fakes if p.grad is not None)]
    live = LiveBytes(device_type="cpu")
    live.add_all([*there, *optimizer_tensors(twin)])
    with live:
        for _ in range(_NUM_STEPS):
            bare_step(type(twin))(twin)
    return max(0, live.peak_bytes - unique_bytes(there) - unique_bytes(optimizer_tensors(twin)))


def _share_at_once(
    optimizer: torch.optim.Optimizer, is_accelerator: bool, movable: int, of_largest: tuple[int, int], temporaries: int
) -> float:
    """See `StateBytes`. A list of parameters needs more temporaries than its largest member alone, in proportion."""
    nbytes, largest = of_largest
    if not temporaries or not nbytes:
        return 1.0
    twin, fakes = _twin(optimizer, is_accelerator)
    for number, fake in enumerate(fakes):
        if number != largest:
            fake.grad = None
    try:
        alone = _temporaries(twin, fakes)
    except Exception:  # some want a gradient for each
        return 1.0
    return min(1.0, nbytes * max(1.0, temporaries / alone) / movable) if alone else 1.0


def _twin(optimizer: torch.optim.Optimizer, is_accelerator: bool) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """A copy of the optimizer over fake parameters with gradients; the original and its hooks are left alone.

    Nothing is assigned by name: an assignment could be a property's, and write to what the original shares. Raises
    TypeError where a copy would still reach the original.
    """
    for name in ("param_groups", "state"):
        if inspect.isdatadescriptor(inspect.getattr_static(type(optimizer), name, None)):
            raise TypeError(f"{name} is a property")
    if _leads_to_an_optimizer([*_own(optimizer).values(), *slots_of(optimizer).values()]):
        raise TypeError("it holds another optimizer")
    twin = type(optimizer).__new__(type(optimizer))
    own = twin.__dict__
    own.update(_own(optimizer))
    for name, value in slots_of(optimizer).items():
        object.__setattr__(twin, name, value)
    for hooks in OPTIMIZER_HOOKS:
        own[hooks] = OrderedDict()
    fakes: dict[int, nn.Parameter] = {}
    own["param_groups"] = [
        {**_settings(group, is_accelerator), "params": [_fake_parameter(p, fakes) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    own["state"] = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if id(parameter) in fakes:
            own["state"][fakes[id(parameter)]] = {key: _fake_like(value) for key, value in state.items()}
    return twin, list(fakes.values())


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its attributes, without those that a copy has not and that lead back to it: a step that schedulers or a swap of
    its state put on the instance, the swap's handle, and hooks."""
    left = {"step", SWAP_ATTRIBUTE, *OPTIMIZER_HOOKS, *OPTIMIZER_STATE_HOOKS}
    return {name: value for name, value in vars(optimizer).items() if name not in left}


def _leads_to_an_optimizer(values: Iterable[Any]) -> bool:
    """Whether an optimizer, or a method of one, is reached from `values`: the copy's step could step it."""
    todo, seen = list(values), set()
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, torch.Tensor | nn.Module | type | str | bytes | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, torch.optim.Optimizer):
            return True
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple | set):
            todo += value
        elif inspect.ismethod(value):
            todo.append(value.__self__)
        elif type(getattr(value, "__dict__", None)) is dict and not callable(value):
            todo += vars(value).values()
    return False


def _settings(group: dict[str, Any], is_accelerator: bool) -> dict[str, Any]:
    if is_accelerator and group.get("foreach", False) is None and not group.get("fused"):
        return {**group, "foreach": True}
    return group


def _fake_parameter(parameter: torch.Tensor, fakes: dict[int, nn.Parameter]) -> nn.Parameter:
    if id(parameter) not in fakes:
        part = local_part(parameter)
        fake = nn.Parameter(
            torch.empty_strided(part.size(), part.stride(), dtype=parameter.dtype, device="cpu"),
            requires_grad=parameter.requires_grad,
        )
        if parameter.requires_grad:
            fake.grad = torch.empty_like(fake)
        fakes[id(parameter)] = fake
    return fakes[id(parameter)]


def _fake_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    if value.dim() == 0 and value.device.type == "cpu" and not value.is_meta:
        with unset_fake_temporarily():
            number = value.item()
        return torch.tensor(number, dtype=value.dtype)  # step counters: their value is looked at
    return torch.empty(local_part(value).size(), dtype=value.dtype, device="cpu")


# -- what no observed step shows ---------------------------------------------------------------------------------------


def count_foreign_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, device: torch.device, read: Callable[[], Any]
) -> int:
    """Bytes on `device` that are none of these. `read` gives the allocator's count, or None where there is none."""
    if read() is None:
        return 0
    parameters = list(model.parameters())
    known = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.is_leaf and p.grad is not None)]
    known += [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if optimizer is not None:
        known += optimizer_tensors(optimizer)
    grain = grain_of(device)
    sizes: dict[Any, int] = {}
    for tensor in known:
        for part in plain_parts(tensor):
            if part.device == device:
                storage = part.untyped_storage()
                sizes[storage_key(storage)] = -(-storage.nbytes() // grain) * grain
    known_bytes = sum(sizes.values())
    if read() > known_bytes:
        gc.collect()  # what nobody can reach is not there for long
    return max(0, int(read()) - known_bytes)


def grain_of(device: torch.device) -> int:
    """Bytes of which every block is a multiple; 1 where the device does not count its bytes.

    The allocator is asked several times: between two readings a collection of garbage may free blocks, and another
    thread may do anything. What they change is a multiple of the grain as well, so the least growth is the grain.
    """
    if device.type == "cpu":
        return 1
    try:
        grown = [_growth(device) for _ in range(_NUM_PROBES)]
    except (AttributeError, RuntimeError):
        return 1
    grain = min((nbytes for nbytes in grown if nbytes > 0), default=1)
    return grain if grain <= _MOST_GRAIN and grain.bit_count() == 1 else 1


def _growth(device: torch.device) -> int:
    """By how much the allocator's count grows with one byte."""
    before = torch.accelerator.memory_allocated(device)
    probe = torch.empty(1, dtype=torch.uint8, device=device)
    grown = torch.accelerator.memory_allocated(device) - before
    del probe
    return grown


def rounding_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    storages: Sequence[Storage],
    off_device: Collection[int],
    grain: int,
) -> int:
    """A bound of what the allocator gives out beyond the bytes of storages, in any step. `storages`: those of the
    observed step; those in `off_device` do not count."""
    if grain == 1:
        return 0
    end = 2 + max((max(storage.born, storage.dies or 0) for storage in storages), default=0)
    # Beside what the operator makes that runs when it dies.
    spans = (
        (max(storage.born, 0), end if storage.dies is None else storage.dies + 1, -storage.nbytes % grain)
        for storage in storages
        if storage.index not in off_device
    )
    most = max(byte_curve(spans, end))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    per_parameter = 1 if optimizer is None else 1 + _OPTIMIZER_TENSORS
    beside = sum(-(parameter.numel() * parameter.itemsize) % grain for parameter in trained)
    steps = 0 if optimizer is None else grain * len(trained)  # a number each, which some optimizers have on the device
    return most + per_parameter * beside + steps


def fingerprint_bytes(sizes: Collection[int], grain: int, *, num_regions: int = 0) -> tuple[int, int]:
    """What fingerprints (runtime/recompute/fingerprint.py) take of an allocator with this grain: for each storage that
    is made again, and for all of them together. `sizes`: bytes of the storages that may be made again;
    `num_regions`: layers that may run again."""
    if grain == 1:
        return 0, 0
    # Together: which words are read, by size; the words of a storage that was just made, how they compare, the flags of
    # all, and the weights of the places, with what is made of them while one fingerprint is taken.
    together = len({*sizes}) * _up(2 * _WORDS_BYTES, grain) + 3 * _up(_FLAGS_BYTES, grain)
    return _up(_WORDS_BYTES, grain), together + 2 * _up(_WEIGHTS_BYTES, grain) + num_regions * grain


def _up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain
