"""The door of this room: weights, gradients and optimizer state that are on the device for their layer's turn alone.

What: `swap_weights(model, optimizer, budget=...)` keeps the parameters of each layer in main memory or in a file. A
layer's weights are fetched ahead of its forward, and again for its backward (or before it is computed again); others
leave for them. Gradients leave as they are complete, or are used by the update within backward (`update="in_backward"`)
and never pile up. `swap_optimizer` moves the moments, and has the weights and gradients of each of its parts brought.

    budget = weights and gradients that are there at a time (a window)
             + three buckets of optimizer state and what the optimizer needs beside one
What the budget has beyond that stays on the device: whole layers, which are then plain.

Parameters stay the user's own objects, with their hooks and versions. What autograd saves of a weight, or of a view of
it, is a handle on the parameter: it checks the version and takes the bytes from wherever they are then. So a graph
holds no weight on the device. A copy changes no bit, and the optimizer's own step runs on the device.

Cost: weights cross the link twice a step inwards and once back, moments once each way, gradients, with `update="step"`,
once each way. Of M micro-batches each brings weights and gradients anew, unless `step` has them all
(micro_batches.py). Python: about 60 us for each tensor and direction. Not covered: see docs/weights.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.engines.base import EngineChoice
from lowtide.engines.host import IDLE_BUFFER_BYTES
from lowtide.engines.tiers.disk import CHUNK_BYTES
from lowtide.engines.tiers.host_buffers import HEAP_SLACK_BYTES
from lowtide.errors import ConfigError, TierFull
from lowtide.optimizer.buckets import LEAST_BYTES
from lowtide.optimizer.groups import OwnedHook
from lowtide.optimizer.requests import check_names, engine_for, tiers_from
from lowtide.optimizer.swap import OptimizerSwap, swap_optimizer
from lowtide.profiling.layers import MIN_BYTES, can_move, find_layers, times_used
from lowtide.profiling.observe_step import NO_HOOKS
from lowtide.runtime.saved.handle import Kept, Shared, open_handle
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.tensors.compiled import ForwardPatch, compiled_parts, refuse_compiled
from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.kinds import PLAIN_TYPES, is_plain, swapped_weights_of, tensors_returned
from lowtide.tensors.optimizers import bare, parameters_of
from lowtide.tensors.private import (
    are_saved_tensors_hooks_enabled,
    are_transforms_active,
    current_autograd_node,
    flat_names,
    flat_weights,
    own_parameters,
    set_flat_weights,
    storage_key,
    top_saved_tensors_hooks,
)
from lowtide.tensors.ranks import has_company
from lowtide.tensors.view import Shape
from lowtide.tensors.wrappers import is_distributed
from lowtide.units import MIB, format_bytes, parse_bytes
from lowtide.weights.load import Incoming
from lowtide.weights.micro_batches import Forwards, MicroBatch, check_unwritten, run_backward
from lowtide.weights.micro_batches import check as check_pieces
from lowtide.weights.moves import FORWARD, UPDATE, Movable, WeightMoves, WeightStats, quiet

UPDATES = ("step", "in_backward")
_CALL = "lowtide.swap_weights"
_BUCKET_SHARE = 16
_MOST_BUCKET_BYTES = 128 * MIB
_BUCKETS = 4
"""Three buckets of state on the device, and temporaries of the update of one."""
_HOST_BYTES = HEAP_SLACK_BYTES + IDLE_BUFFER_BYTES + 2 * CHUNK_BYTES
"""Resident memory of the host engine beside what it holds; of a small budget a quarter is set aside for it."""


@dataclass(eq=False, slots=True)
class _Unit:
    """A layer, or another part of the model: what comes and goes together."""

    name: str
    kind: str
    """The name of its class."""
    items: list[Movable]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def gradients(self) -> list[Movable]:
        return [item.gradient for item in self.items if item.gradient is not None]

    def begin_backward(self, moves: WeightMoves) -> None:
        """Have its weights there, and room for its gradients."""
        key = ("backward", self.name)
        if any(item.slot is None for item in self.items):
            return  # of a graph that is older than `remove()`
        moves.arrive_at_the_end()
        if moves.order.last != key:
            away = [item for item in self.gradients if item.is_away]
            new = tuple(item for item in self.gradients if item.tensor is None)
            moves.use(key, [*self.items, *away], new)


class _Stay(NamedTuple):
    """A weight during the backward of a part: what autograd's handles on it share. It must not lead to the model, or
    one that keeps its last output would never die."""

    moves: WeightMoves
    item: Movable
    unit: _Unit
    num_assigned: int | None
    """Of the item then; None where plain autograd would take what the weight shows in backward, too."""

    def read(self) -> torch.UntypedStorage:
        """Its bytes on the device, fetched if need be."""
        item = self.item
        with self.moves.lock:
            if item.slot is None:  # the swap was removed before this graph's backward
                return item.parameter.untyped_storage()
            self.unit.begin_backward(self.moves)
            if not item.is_here:
                self.moves.bring([item])
            if self.num_assigned not in (None, item.num_assigned):
                raise RuntimeError(
                    f"lowtide: {item.name} was given other memory (.data = ...) between a forward and its backward, "
                    "which reads what was there before; assign it before the forward, or write in place (copy_)"
                )
            return item.parameter.untyped_storage() if item.buffer is None else item.buffer


def swap_weights(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: int | str | None = None,
    update: str = "step",
    tier: str = "host",
    engine: EngineChoice = None,
    min_bytes: int | str = MIN_BYTES,
    folder: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    bucket_bytes: int | None = None,
    layers: Sequence[str] | None = None,
) -> WeightSwap:
    """Keep the weights of `model`, their gradients and the state of `optimizer` in main memory or a file, but for the
    layers whose turn it is, until `remove()` of the handle or the end of its `with` block. The same bits; parameters
    stay the objects that they are.

    `budget`: bytes on the device for weights, gradients and optimizer state; absent, the least that works. What it has
    beyond that keeps whole layers there. `update`: "step", where gradients leave until `optimizer.step()`, or
    "in_backward", where each parameter is updated in the backward pass and its gradient is freed: for one backward pass
    a step, without clipping. `tier`, `engine`: as in `swap_optimizer`. Weights below `min_bytes` stay.
    `bucket_bytes`: of optimizer state, where there is no budget. `layers`: their names; absent, they are found.
    `device`: where to train; for a model whose weights are in main memory and do not fit there. `folder`: safetensors
    files with the weights of a model that was built on 'meta'. Each goes to its tier before the next one is read.
    Put a plan on the model after this. Raises `ConfigError` for a budget that is too small, several ranks, FSDP2,
    compiled modules, and every other mistake.
    """
    found = bare(optimizer) if optimizer is not None else None
    _check(model, found, update)
    is_coming = folder is not None or device is not None
    incoming = Incoming(_CALL, model, folder, "cpu" if device is None else device) if is_coming else None
    if incoming is None:
        _check_place(model)
    check_names(tier, "auto")
    if tier == "mapped":
        raise ConfigError("lowtide.swap_weights: tier 'mapped' is for optimizer state alone; use 'host' or 'disk'")
    least = parse_bytes(min_bytes)
    movable = _units_of(model, least, find_layers(model) if layers is None else layers)
    if not movable:
        raise ConfigError(
            f"{_CALL}: {type(model).__name__} has no weights of {format_bytes(least)} and more that could move; give "
            "a smaller min_bytes"
        )
    parameters = [item.parameter for unit in movable for item in unit.items]
    place = parameters[0].device if incoming is None else incoming.device
    mode = update if found is not None else "none"
    window_bytes, found_bytes, staying = _sizes(movable, budget, mode, is_host=place.type == "cpu")
    movable = [unit for unit in movable if unit not in staying]
    with contextlib.ExitStack() as undo:
        if incoming is not None:
            undo.callback(incoming.give_back)
            incoming.promise()
        chosen = engine_for(engine, torch.optim.SGD(parameters[:1], lr=0.0), tier)
        moves = WeightMoves(chosen, place, tiers_from(chosen, tier))
        moves.stats.window_bytes = window_bytes
        swap = WeightSwap(model, movable, moves, closes_engine=chosen is not engine)
        undo.callback(swap.remove)
        swap.attach(found, update, bucket_bytes or found_bytes, incoming)
        undo.pop_all()
    return swap


def _units_of(model: nn.Module, least_bytes: int, layers: Sequence[str]) -> list[_Unit]:
    """The parts of a model with the weights in them that can move; a tied one is in several."""
    counts = times_used(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    item_of = {
        p: Movable(names[p], p, Shape.of(p), is_gradient=False) for p in names if can_move(p, least_bytes, counts)
    }
    units = [
        _Unit(name, type(module).__name__, [item_of[p] for p in module.parameters() if p in item_of])
        for name, module in _parts_of(model, set(layers)).items()
    ]
    return [unit for unit in units if unit.items]


def _check(model: Any, optimizer: Any, update: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{_CALL}: model= takes a torch.nn.Module, not {type(model).__name__}")
    if update not in UPDATES:
        raise ConfigError(f"{_CALL}: update '{update}' is none of {', '.join(UPDATES)}")
    if fsdp_modules(model) or any(is_distributed(parameter) for parameter in model.parameters()):
        raise ConfigError(
            f"{_CALL}: {type(model).__name__} is sharded by FSDP2 (fully_shard), which moves weights itself; swap the "
            "weights of a model that is not sharded, or use swap_optimizer, which works with it"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or has_company():
        raise ConfigError(
            f"{_CALL}: is for one rank: gradients of other ranks are not there yet when a layer's own leave; use "
            "swap_optimizer, which works with DDP and FSDP2"
        )
    if any(map(swapped_weights_of, model.modules())):
        raise ConfigError(f"{_CALL}: the weights of this model are swapped already; call remove() of the handle first")
    under = patched_module(model)
    if under is not None:
        raise ConfigError(
            f"{_CALL}: this model is under a lowtide plan already; call remove() on it, swap the weights, and apply "
            "the plan after that"
        )
    compiled = next(iter(compiled_parts(model)), None)
    if compiled is not None:
        raise ConfigError(f"{_CALL}: '{compiled}' is compiled, and compiled code holds its weights; do not compile it")
    refuse_compiled(model, _CALL)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if optimizer is None and trained:
        raise ConfigError(f"{_CALL}: optimizer= is missing, and {type(model).__name__} has weights that are trained")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{_CALL}: optimizer= takes a torch.optim.Optimizer, not {type(optimizer).__name__}")


def _check_place(model: nn.Module) -> None:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        where = f"parameters on {' and '.join(devices)}" if devices else "no parameters"
        raise ConfigError(
            f"{_CALL}: {type(model).__name__} has {where}; all must be on one device, with memory, or folder= "
            "says where their bytes are"
        )


def _parts_of(model: nn.Module, layers: set[str]) -> dict[str, nn.Module]:
    """What comes and goes together, by name: layers, and the outermost modules that have none inside."""
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, name: str) -> None:
        path = f"{name}." if name else ""
        holds_layers = any(layer.startswith(path) for layer in layers) if path else True
        children = [(child, f"{path}{key}") for key, child in module.named_children()]
        if name in layers or not holds_layers or (not name and not children):
            if module not in found.values() and next(module.parameters(), None) is not None:
                found[name] = module
            return
        for child, child_name in children:
            walk(child, child_name)

    walk(model, "")
    return found


def _sizes(
    units: list[_Unit], budget: int | str | None, update: str, *, is_host: bool
) -> tuple[int, int | None, list[_Unit]]:
    """Deal out a budget: the window, the bucket of optimizer state (None: as `swap_optimizer` chooses), and the parts
    that stay. Raises ConfigError where it is too small."""
    largest = max(unit.nbytes for unit in units)
    # In backward a layer's weights and gradients are there, and the weights of the next one arrive.
    factor = 2 if update == "step" else 1
    least = (factor + 1) * largest
    in_flight = 2 * largest if update == "in_backward" else 0
    if budget is None:
        return least, None, []
    try:
        total = parse_bytes(budget)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{_CALL}: budget: {error}") from error
    asked, total = total, total - min(total // 4, _HOST_BYTES) * is_host
    bucket = 0
    if update != "none":
        bucket = min(max(total // _BUCKET_SHARE, LEAST_BYTES), _MOST_BUCKET_BYTES)
    window = total - _BUCKETS * bucket - in_flight
    if window < least:
        floor = least + in_flight
        needed = floor + _BUCKETS * max(floor // (_BUCKET_SHARE - _BUCKETS) + 1, LEAST_BYTES)
        needed = needed if bucket else floor
        needed += min(needed // 3 + 1, _HOST_BYTES) * is_host
        raise ConfigError(
            f"{_CALL}: budget {format_bytes(asked)} is too small: the largest part that moves at once has "
            f"{format_bytes(largest)} of weights, and with its gradients, the next part and the optimizer's state "
            f"{format_bytes(needed)} are needed; give at least that"
        )
    staying: list[_Unit] = []
    spare = window - 2 * max(least, bucket)  # at most two bytes of weights and gradients to one of state, in an update
    if sum(unit.nbytes for unit in units) * factor <= window:
        return window, bucket or None, units
    for unit in units:
        if unit.nbytes * factor <= spare:
            spare -= unit.nbytes * factor
            window -= unit.nbytes * factor
            staying.append(unit)
    return window, bucket or None, staying


def _has_own_handles(pack: Callable) -> bool:
    """Whether these hooks call `hold` by themselves, as a plan's do, or save nothing, as those of a checkpoint."""
    return (getattr(pack, "__module__", None) or "").startswith(("lowtide.", "torch.utils.checkpoint"))


def _forget_aliases(model: nn.Module) -> None:
    """After `torch.func.functional_call` a recurrent module keeps aliases of other tensors until its next forward."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            own, pairs = own_parameters(module), zip(flat_names(module), flat_weights(module), strict=True)
            set_flat_weights(module, [own.get(name, alias) for name, alias in pairs])


class WeightSwap:
    """The handle of one model. Made by `swap_weights`."""

    def __init__(self, model: nn.Module, units: list[_Unit], moves: WeightMoves, *, closes_engine: bool) -> None:
        self.model = model
        self._units = units
        self._moves = moves
        self._closes_engine = closes_engine
        self.weights: dict[torch.Tensor, Movable] = {i.parameter: i for unit in units for i in unit.items}
        """The weights that come and go."""
        self._unit_of = {item: unit for unit in reversed(units) for item in unit.items}
        self._open: list[_Unit] = []
        """Parts whose forward runs now, from the outside in."""
        self._forwards = Forwards(model, [unit.name for unit in units])
        self._optimizer: torch.optim.Optimizer | None = None
        """Steps after backward, with gradients that have left; None where backward updates."""
        self._undo: list[Callable[[], Any]] = []
        self.optimizer_swap: OptimizerSwap | None = None
        self.is_planned = False
        """Whether plans say which weights move, and count them."""
        self._is_limited = False
        """Whether one has."""

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return self._moves.device

    # -- attach and remove ---------------------------------------------------------------------------------------------

    def attach(
        self, optimizer: torch.optim.Optimizer | None, update: str, bucket_bytes: int | None, incoming: Incoming | None
    ) -> None:
        """Send the weights away, one after the other, and put on what brings them back in time. `incoming`: gives each
        its bytes just before; None: they are there."""
        moves = self._moves
        if optimizer is not None and self.weights:
            self._swap_state(optimizer, overlap=update, bucket_bytes=bucket_bytes or "auto")
        self._optimizer = optimizer if update == "step" else None
        self._place_all()
        for item in self.weights.values():
            if incoming is not None:
                incoming.take(item.parameter)
            moves.hide([item])
        if incoming is not None:
            incoming.take_rest()
        self._put_on_hooks(optimizer)
        moves.engine.forget_free_memory()  # what the weights took

    def _place_all(self) -> None:
        """Places for weights, and for the gradients of those that are trained and have none yet."""
        stepped = set() if self._optimizer is None else {*parameters_of(self._optimizer)}
        wanted = sum(item.nbytes * (2 if parameter in stepped else 1) for parameter, item in self.weights.items())
        try:
            for parameter, item in self.weights.items():
                if item.slot is None:
                    self._moves.place(item)
                if item.gradient is None and item.parameter.requires_grad and parameter in stepped:
                    gradient = Movable(f"the gradient of {item.name}", item.parameter, item.shape, is_gradient=True)
                    self._moves.place(gradient)
                    item.gradient = gradient
                    self._follow(gradient)
        except TierFull as error:
            raise ConfigError(
                f"{_CALL}: {format_bytes(wanted)} of weights and gradients have no room on "
                f"{' and '.join(self._moves.engine.tiers)} ({error}); make room, or give a larger budget, so that more "
                "of them stay on the device"
            ) from error

    def _put_on_hooks(self, optimizer: torch.optim.Optimizer | None) -> None:
        undo = self._undo
        for unit in self._units:
            module = self.model.get_submodule(unit.name)
            undo.append(ForwardPatch(module, self._around(unit), weights=self).close)
            for inner in module.modules():
                own = {name: self.weights[p] for name, p in inner.named_parameters(recurse=False) if p in self.weights}
                if own:
                    load = OwnedHook(self, lambda swap, _, *words, own=own: swap._before_load(own, *words[:3]))
                    undo.append(inner.register_load_state_dict_pre_hook(load).remove)
                    show = OwnedHook(self, lambda swap, _, *words, own=own: swap._show_in(own, *words[:2]))
                    undo.append(inner.register_state_dict_post_hook(show).remove)
        undo.append(ForwardPatch(self.model, self._around_model, weights=self).close)
        flush = OwnedHook(self, lambda swap, *_: swap.flush())
        undo.append(self.model.register_load_state_dict_post_hook(flush).remove)
        if optimizer is not None:
            undo.append(optimizer.register_step_post_hook(lambda *_: self.flush()).remove)

    def _follow(self, gradient: Movable) -> None:
        """Have it come before it is added to, and leave when it is complete."""
        begins = OwnedHook(self, lambda swap, _: swap._before_gradient(gradient))
        self._undo.append(gradient.parameter.register_hook(begins).remove)
        complete = OwnedHook(self, lambda swap, _: swap._after_gradient(gradient))
        self._undo.append(gradient.parameter.register_post_accumulate_grad_hook(complete).remove)

    def remove(self) -> None:
        """Bring weights and gradients back to the device, in plain tensors, and leave the model and its optimizer as
        they were. Idempotent. Where memory runs out the swap stays in force, and a later call goes on from there. A
        later call also gives slots back that somebody held before."""
        moves = self._moves
        with moves.lock:
            moves.put_copied_back()
            moves.order.staying = frozenset()
            _forget_aliases(self.model)
            moves.hide_all()
            if self.optimizer_swap is not None:
                self.optimizer_swap.detach()
                self.optimizer_swap = None
            for item in self._all_items():
                if moves.is_free(item):
                    tensor, host = item.tensor, item.host
                    assert tensor is not None and host is not None
                    with quiet():
                        plain = torch.empty_strided(*item.shape[:2], dtype=item.shape.dtype, device=self.device)
                        tensor.data = plain.copy_(host)
                moves.free(item)
            moves.free_left()
            while self._undo:
                self._undo[-1]()
                self._undo.pop()
            if self._closes_engine:
                moves.engine.close()

    def __enter__(self) -> WeightSwap:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # -- under plans ---------------------------------------------------------------------------------------------------

    def place_state(self, *, resident: float, bucket_bytes: int, num_buffers: int) -> None:
        """Have the optimizer's state move in buckets of this size, unless some of it has moved already."""
        before = self.optimizer_swap
        if before is None or before.stats.swapped_bytes:
            return
        before.detach()
        how: Any = {"resident": resident, "bucket_bytes": bucket_bytes, "num_buffers": num_buffers}
        self._swap_state(before.optimizer, overlap="in_backward", **how)

    def _swap_state(self, optimizer: torch.optim.Optimizer, **how: Any) -> None:
        self.optimizer_swap = swap_optimizer(optimizer, engine=self._moves.engine, weights=self.holding, **how)

    def move_only(self, names: Collection[str], window_bytes: int) -> None:
        """Have the weights of no parts but these come and go, with so many bytes of them there at a time. Of what
        stays after an earlier call no more stays than now."""
        moves, moving = self._moves, {item for unit in self._units if unit.name in names for item in unit.items}
        staying = frozenset(self.weights.values()) - moving
        if self._is_limited:
            staying &= moves.order.staying
        moves.hide_all()
        moves.order.staying = staying
        moves.stats.window_bytes = window_bytes + sum(item.nbytes for item in staying)
        self._is_limited = True
        moves.bring(staying)

    # -- a layer's turn ------------------------------------------------------------------------------------------------

    def _around(self, unit: _Unit) -> Callable[[Callable, tuple, dict], Any]:
        def around(forward: Callable, args: tuple, kwargs: dict) -> Any:
            kind = FORWARD if current_autograd_node() is None else "again"
            is_whole = kind == FORWARD and not self._open and torch.is_grad_enabled()
            cuts = self._forwards.at(unit.name) if is_whole else None
            if self._optimizer is not None and any(
                item.parameter.requires_grad and item.gradient is None for item in unit.items
            ):
                self._place_all()  # unfrozen, or in a new group
            self._open.append(unit)
            try:
                if cuts is not None:
                    cuts.enter(unit.name)
                with self._moves.using((kind, unit.name), unit.items), self._holding_saved():
                    output = forward(*args, **kwargs)
            except RuntimeError as error:
                if NO_HOOKS not in str(error):
                    raise
                raise ConfigError(
                    f"{_CALL}: '{unit.name}' ({unit.kind}) uses torch.func (grad, vjp, jacrev or "
                    "hessian), around which PyTorch allows no saved-tensor hooks, so its weights cannot come and go; "
                    "swap the optimizer's state alone (swap_optimizer)"
                ) from error
            finally:
                self._open.remove(unit)
                if kind == FORWARD and not self._open and self.device.type == "cpu":
                    self._moves.arrive()  # the model's or the loop's own code runs next
            if cuts is not None and cuts.is_watched:
                self._forwards.sums |= self._moves.sums(unit.items)
            if torch.is_grad_enabled():
                self._wait_for_backward(unit, output)
                output = output if cuts is None else cuts.leave(output)
            return output

        return around

    def _around_model(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        output = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.flush()  # no backward follows, and who reads or writes weights now is to find all of them alike
        return output

    def _wait_for_backward(self, unit: _Unit, output: Any) -> None:
        """Have the part's weights there when its backward begins."""
        if are_transforms_active():
            return
        hook = OwnedHook(self._moves, lambda moves, _: unit.begin_backward(moves))
        for leaf in tensors_returned(output):
            if leaf.grad_fn is not None:
                leaf.register_hook(hook)

    # -- several micro-batches -----------------------------------------------------------------------------------------

    def step(self, losses: Iterable[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Forward and backward of the micro-batches of one optimizer step, layer by layer. A layer is fetched twice for
        M of them, not 2 M times; M + 1 times where a forward leaves something for the next one, which the first step
        shows and a line says. Gradients are added to in their order, so that the bits are those of `loss().backward()`
        for one after the other. `optimizer.step()` comes after it.

        `losses`: each runs a forward of the model and returns its scalar loss, already divided as the sum should be.
        Returns the losses, without their graphs. What the layers of all micro-batches save is there at a time: put the
        layers under torch's checkpoint. `update="in_backward"` takes several micro-batches here alone.

        Raises `ConfigError` before any gradient is there: under a plan, for no losses, and for a model in which
        plain's sums are not formed layer by layer (tied weights, a layer that runs twice, a tensor that goes around a
        layer); and within backward where that draws random numbers or writes into buffers. An error of a forward leaves
        all gradients as they were.
        """
        batches: list[MicroBatch] = []

        def hold_updates(holds: bool) -> None:
            """Whether gradients wait for those of more micro-batches before they update anything."""
            if self.optimizer_swap is not None:
                self.optimizer_swap.hold_updates(holds)

        try:
            self._run_forwards(losses, batches)
            results = [batch.loss.detach() for batch in batches if batch.loss is not None]
            parts = {unit.name: dict.fromkeys(item.parameter for item in unit.items) for unit in self._units}
            names: dict[torch.Tensor, str] = {weight: name for name, weight in self.model.named_parameters()}
            if cast := check_pieces(batches, names, parts):
                self._forwards.keep_order_for(cast)
            self._moves.order.gathers = True
            run_backward(batches, self.model, before=lambda batch: hold_updates(not batch.is_last), after=self._is_over)
        finally:
            self._forwards.sums = {}
            self._moves.order.gathers = False
            hold_updates(False)
            for batch in batches:
                batch.let_go()
            self._moves.arrive()
        return results

    def _run_forwards(self, losses: Iterable[Callable[[], torch.Tensor]], batches: list[MicroBatch]) -> None:
        """Run all forwards, and add to `batches` what each leaves. Raises `ConfigError` as `step` does."""
        if self.is_planned or patched_module(self.model) is not None:
            raise ConfigError("lowtide: step: the model is under a plan; call remove() of the plan's handle first")
        calls = list(losses) if isinstance(losses, Iterable) else []
        if not calls or not all(map(callable, calls)):
            raise ConfigError(
                "lowtide: step: takes a list of functions, each of which runs the forward of one micro-batch and "
                "returns its loss"
            )
        if self.optimizer_swap is not None and self.optimizer_swap.has_begun:
            raise ConfigError("lowtide: step: backward has updated weights already; call optimizer.step() first")
        self._forwards.run(calls, batches)
        check_unwritten(self._forwards.sums, self._moves.sums(self._forwards.sums))

    def _is_over(self, name: str) -> None:
        """The backward of a part is over for all micro-batches: its gradients may leave."""
        self._moves.order.gathers = False
        for unit in self._units:
            for item in unit.gradients if unit.name == name else ():
                if item.tensor is not None:
                    self._after_gradient(item)
        self._moves.order.gathers = True

    # -- what autograd saves -------------------------------------------------------------------------------------------

    def _holding_saved(self) -> contextlib.AbstractContextManager[Any]:
        """Hooks around a part's forward that give handles for weights."""
        if not torch.is_grad_enabled() or not are_saved_tensors_hooks_enabled() or are_transforms_active():
            return contextlib.nullcontext()
        hooks, swap = top_saved_tensors_hooks(), weakref.proxy(self)  # a graph holds its hooks
        if hooks is not None and _has_own_handles(hooks[0]):
            return contextlib.nullcontext()
        pack, unpack = hooks or (Kept, open_handle)
        return saved_tensors_hooks(
            lambda tensor: swap.hold(tensor) or pack(tensor),
            lambda held: held.open() if isinstance(held, Shared) else unpack(held),
        )

    def hold(self, tensor: torch.Tensor) -> Shared | None:
        """A handle on a saved tensor that shows a swapped weight; None for any other."""
        if type(tensor) not in PLAIN_TYPES or not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        key = storage_key(tensor.untyped_storage())
        item = self._moves.items.get(key)
        if item is None or item.is_gradient or storage_key(item.parameter.untyped_storage()) != key:
            return None  # also where another parameter was given its `.data`
        unit = next((unit for unit in reversed(self._open) if item in unit.items), self._unit_of[item])
        num_assigned = None if tensor is item.parameter else item.num_assigned
        with quiet():
            return Shared(_Stay(self._moves, item, unit, num_assigned), tensor)

    def moves(self, tensor: torch.Tensor) -> bool:
        """Whether this is a weight that comes and goes."""
        return tensor in self.weights

    def weight_in(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """The weight whose bytes a storage has now, or stands for while they are away."""
        item = self._moves.items.get(storage_key(storage))
        return None if item is None or item.is_gradient else item.parameter

    def bring(self, weight: torch.Tensor) -> None:
        """Have it on the device, out of turn."""
        self._moves.bring([self.weights[weight]])

    # -- gradients and updates -----------------------------------------------------------------------------------------

    def _before_gradient(self, item: Movable) -> None:
        """A gradient is about to be added to one that has left."""
        item.is_assigned = item.tensor is not None and not item.is_here and not item.is_away
        if item.is_away:
            self._moves.bring([item])

    def _after_gradient(self, item: Movable) -> None:
        """A gradient is complete, for this backward pass."""
        if self._moves.order.gathers:
            return
        self._moves.leave(item)
        self._moves.keep_to_window()

    @contextlib.contextmanager
    def holding(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Within, an optimizer may step these parameters: their weights and gradients are on the device."""
        weights = [self.weights[p] for p in parameters if p in self.weights]
        gradients = [item.gradient for item in weights if item.gradient is not None]
        items = [*weights, *(item for item in gradients if item.tensor is not None)]
        if not items:
            yield
            return
        with self._moves.using((UPDATE, items[0].name), items):
            yield
        for item in weights:
            if not item.is_clean and item not in self._moves.order.staying:
                self._moves.send(item)

    # -- what others see -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send away what is on the device, and block until main memory and files have all of it."""
        self._moves.hide_all()

    def _all_items(self) -> tuple[Movable, ...]:
        gradients = (item.gradient for item in self.weights.values() if item.gradient is not None)
        return (*self.weights.values(), *gradients)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Within, all weights and gradients are on the device, whatever the budget: to read or change them there."""
        items = self._all_items()
        try:
            with self._moves.keeping(items):
                self._moves.bring(item for item in items if item.tensor is not None)
                yield
        finally:
            self.flush()

    def check_copied(self) -> None:
        """A module is copied or pickled. Raises ConfigError where that would read weights that are away."""
        if self.device.type == "cpu" or not any(item.is_away for item in self.weights.values()):
            return
        raise ConfigError(
            f"{_CALL}: this model is copied or pickled as a whole, and weights of it are away. Do it inside of 'with "
            "handle.here():', or save model.state_dict()"
        )

    def _before_load(self, own: dict[str, Movable], state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """These weights of a module are about to be loaded."""
        new = [state_dict[prefix + name] for name in own if prefix + name in state_dict]
        if metadata.get("assign_to_params_buffers") and any(tensor.device != self.device for tensor in new):
            raise ConfigError(
                f"{_CALL}: load_state_dict(assign=True) would put tensors of main memory in place of weights of "
                f"{self.device} that are swapped; call it without assign"
            )
        self._moves.bring(own.values())

    def _show_in(self, own: dict[str, Movable], state_dict: dict[str, Any], prefix: str) -> None:
        """A checkpoint is made: of weights that are away, it has the tensors in main memory."""
        for key, item in [(prefix + name, item) for name, item in own.items()]:
            value = state_dict.get(key)
            is_shown = isinstance(value, torch.Tensor) and is_plain(value) and self.weight_in(value.untyped_storage())
            if self.device.type != "cpu" and is_shown is item.parameter and self._moves.is_free(item):
                state_dict[key] = item.host

    @property
    def stats(self) -> WeightStats:
        """What was moved so far, and what lives where."""
        swapped = sum(item.nbytes for item in self.weights.values())
        total = sum(parameter.nbytes for parameter in self.model.parameters())
        return dataclasses.replace(self._moves.stats, swapped_bytes=swapped, resident_bytes=total - swapped)

    def __str__(self) -> str:
        stats = self.stats
        tiers = sorted({item.slot.tier for item in self.weights.values() if item.slot is not None})
        return (
            f"{type(self.model).__name__}: {format_bytes(stats.swapped_bytes)} of weights on "
            f"{', '.join(tiers) or 'no tier'} in {len(self._units)} parts, {format_bytes(stats.resident_bytes)} "
            f"resident; {format_bytes(stats.peak_bytes)} of weights and gradients at most on {self.device} "
            f"(window {format_bytes(stats.window_bytes)}); {format_bytes(stats.fetched_bytes)} fetched, "
            f"{format_bytes(stats.sent_bytes)} sent, {stats.stall_seconds:.3f} s waited"
        )
