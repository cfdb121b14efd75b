"""`observe`: one real training step of a model, written down as a profile, and no trace of it left behind.

What: a forward and a backward under a `StepRecorder`. Gradients come from `torch.autograd.grad`, so `.grad` is not
touched and no gradient hook of an optimizer fires; random state, buffers and the batch are as they were. Saved
activations are parked (saved_tensors.py), so the observed step needs little more memory than the largest layer. Models
that FSDP2 shards take a whole step, with all that they remember set aside (tensors/fsdp.py).

The step that is observed: forward, the loss is picked out and the rest of the output let go, backward. Gradients are
those of a first micro-batch: each is there from the operator that makes it.

Cost: about 0.1 ms an operator and one copy of the activations each way. Not covered: several forwards of the model in
one step (the activations of the first are nodes, those of the others count as bytes that stay).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.core.profile import Profile
from lowtide.core.recipe import Recipe
from lowtide.engines.device_ops import TorchDevice
from lowtide.errors import ConfigError, NothingToTrainError
from lowtide.profiling.build_profile import find_recipes, profile_of
from lowtide.profiling.layers import find_layers
from lowtide.profiling.module_watch import describe
from lowtide.profiling.op_timer import Clock, DeviceClock, HostClock
from lowtide.profiling.saved_tensors import file_stash, host_stash
from lowtide.profiling.smaller import measured_codec
from lowtide.profiling.state_bytes import fingerprint_bytes, grain_of, rounding_bytes, state_bytes
from lowtide.profiling.step_record import Trace
from lowtide.profiling.step_recorder import StepRecorder
from lowtide.profiling.untouched import (
    apart,
    cut_graphs,
    grads_set_aside,
    hooks_set_aside,
    refuse_gradient_hooks,
    untouched,
    warn,
)
from lowtide.tensors.compiled import refuse_compiled
from lowtide.tensors.fsdp import at_rest, fsdp_modules, local_part, sharded_parameters, unreduced_gradients
from lowtide.tensors.kinds import ACCUMULATOR, device_of, nodes_between, swapped_weights_of, tensors_returned
from lowtide.tensors.optimizers import optimizer_of
from lowtide.tensors.private import (
    num_compiled_graphs,
    tree_leaves,
    tree_map_only,
)

_DID_NOT_FIT = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
NO_HOOKS = "don't yet support saved tensor hooks"
"""Of the error with which torch.func refuses to run inside of saved-tensor hooks."""
_OUT_OF_MEMORY = "can't allocate memory"


def observe(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    layers: tuple[str, ...] | None = None,
    needs_scalar: bool = True,
    holds_casts: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Profile:
    """Run one forward and backward of `model` on `batch` and say what it made, saved, read and freed.

    `batch` is a mapping (`model(**batch)`), a tuple (`model(*batch)`) or a function without arguments that returns the
    loss. The loss is the output, its `.loss`, or `loss(output)`. With `needs_scalar=False` any output will do: all of
    its floating tensors get gradients of one.
    `holds_casts`: what autocast makes of parameters lives until the forward is over, as with its cache, which is off.
    `tell` is given a line where something of the user's moved on and cannot be put back; absent: a warning.

    Raises ConfigError for a batch that does not fit, and for a loss that is no scalar or needs no gradient.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"observe: expected a torch.nn.Module, not {type(model).__name__}")
    device = device_of(model)
    if device.type == "meta":
        raise ConfigError("observe: the model is on the meta device; give it weights, or plan it without running it")
    is_accelerator = device.type != "cpu"
    is_sharded_model = bool(fsdp_modules(model))
    names = find_layers(model) if layers is None else layers
    refuse_compiled(model, "observe")
    optimizer = optimizer_of(optimizer, "observe")
    refuse_lazy(model, "observe")

    def run(accumulates: bool) -> tuple[Trace, str]:
        ops = TorchDevice(device) if is_accelerator else None
        clock: Clock = HostClock() if ops is None else DeviceClock(ops)
        stash = host_stash() if is_accelerator else file_stash()
        recorder = StepRecorder(
            device=device,
            clock=clock,
            stash=stash,
            layers=names,
            codec_of=measured_codec,
            holds_casts=holds_casts,
            counted=ops,
        )
        try:
            with untouched(model, (batch, loss), device, tell or warn) as before, at_rest(model) as gathered:
                recorder.state.about_to_write = before.about_to_write
                recorder.state.storages.weights = swapped_weights_of(model)
                cut, ends = cut_graphs(before)
                given = tree_map_only(torch.Tensor, cut, batch)
                for name, parameter in gathered.items():
                    recorder.state.storages.enroll_gathered(parameter, name)
                how: Any = {"needs_scalar": needs_scalar, "accumulates": accumulates, "ends": ends}
                return record_step(model, given, recorder, loss, **how), recorder.watch.batch
        finally:
            recorder.state.about_to_write = None  # else the recorder, a cycle, would hold the batch until a collection
            stash.close()

    num_graphs = num_compiled_graphs()
    try:
        # FSDP2 reduces what reaches `.grad`, and only that.
        trace, shapes = apart(run, accumulates=is_sharded_model)
        if num_compiled_graphs() != num_graphs:  # what compiling took is no part of a step
            trace, shapes = apart(run, accumulates=is_sharded_model)
    except (RuntimeError, ConfigError) as error:
        if is_sharded_model or not wants_accumulation(error):
            raise
        trace, shapes = apart(run, accumulates=True)
    find_recipes(trace)
    state = state_bytes(
        model,
        inputs=input_bytes(trace),
        optimizer=optimizer,
        device_type=device.type,
        is_accelerator=is_accelerator,
    )
    grain = grain_of(device)
    may_be_made = [node.storage.nbytes for node in trace.nodes if node.codec or isinstance(node.recipes[0], Recipe)]
    fingerprint, fingerprints = fingerprint_bytes(may_be_made, grain, num_regions=len(names))
    rounding = rounding_bytes(model, optimizer, trace.storages, trace.off_device, grain) + fingerprints
    return profile_of(
        trace,
        model,
        device=device.type,
        is_fake=False,
        batch=shapes,
        layers=names,
        state=dataclasses.replace(state, rounding=rounding, fingerprint=fingerprint),
    )


def refuse_lazy(model: nn.Module, call: str) -> None:
    """Raise ConfigError for a model that has parameters or buffers without a shape."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{call}: '{name}' has no shape yet (a lazy module); run the model once, so that it is initialized as "
                "it would be without lowtide"
            )


def wants_accumulation(error: Exception) -> bool:
    """Reentrant checkpointing (torch's older kind) works with `.backward()` only, and says so."""
    return "use_reentrant=True" in str(error)


def input_bytes(trace: Trace) -> int:
    """Bytes of the batch on the device."""
    return sum(s.nbytes for s in trace.storages if s.kind == "input" and s.index not in trace.off_device)


def record_step(
    model: nn.Module,
    batch: Any,
    recorder: StepRecorder,
    loss: Callable[[Any], torch.Tensor] | None,
    *,
    needs_scalar: bool,
    accumulates: bool = False,
    ends: Sequence[torch.Tensor] = (),
) -> Trace:
    """One forward and backward under `recorder`. With `accumulates`, gradients go through `.grad`, set aside before.
    `ends`: leaves where graphs were cut off, to which the backward pass comes too."""
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    shards = sharded_parameters(model)
    for name, parameter in model.named_parameters():
        is_shard = id(parameter) in shards
        recorder.state.storages.enroll(parameter, "parameter", f"{name} (shard)" if is_shard else name)
    for name, buffer in model.named_buffers():
        recorder.state.storages.enroll(buffer, "buffer", name)
    for tensor in inputs:
        recorder.state.storages.enroll(tensor, "input", "input")
    trained: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    num_trained = len(trained)

    def look_at_inputs() -> None:
        known = {id(tensor) for tensor in trained}
        leaves = [t for t in [*inputs, *recorder.watch.leaves] if t.requires_grad and t.is_leaf]
        trained.extend({id(t): t for t in [*leaves, *ends] if id(t) not in known}.values())
        if not trained:
            raise NothingToTrainError(
                "lowtide: no parameter requires a gradient, so there is nothing to plan; unfreeze what is to be "
                "trained first"
            )

    with recorder.following(model), recorder, torch.enable_grad():
        with recorder.saves.hooks():
            try:
                roots = _forward(model, batch, loss, needs_scalar, look_at_inputs)
            except (RuntimeError, ConfigError) as error:
                if NO_HOOKS not in str(error):
                    raise
                raise ConfigError(
                    f"observe: {type(model).__name__} uses torch.func (grad, vjp, jacrev or hessian) in its forward, "
                    "around which PyTorch lets nobody watch what is saved; train it under rules (lowtide.apply), which "
                    "leave such a layer alone"
                ) from error
        trained += _leaves_inside(roots, trained)
        recorder.begin_backward(roots, model)
        with hooks_set_aside(trained), grads_set_aside(trained if accumulates else ()):
            if accumulates:
                refuse_gradient_hooks(trained)
            grads = _backward(roots, trained, accumulates)
            # The graph of the step is over, and what it held is free; only the gradients are still there.
            roots.clear()
            made = [*grads[:num_trained], *unreduced_gradients(model)]
            return recorder.finish([None if grad is None else local_part(grad) for grad in made])


def _forward(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    needs_scalar: bool,
    look_at_inputs: Callable[[], None],
) -> list[torch.Tensor]:
    output = batch() if callable(batch) and not isinstance(batch, Mapping | tuple) else _call(model, batch)
    look_at_inputs()
    if needs_scalar:
        return [_scalar(output, loss)]
    picked = output if loss is None else loss(output)
    roots = [t for t in tensors_returned(picked) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not roots:
        raise ConfigError(
            f"observe: no tensor that requires a gradient was found in what {type(model).__name__} returns "
            f"({type(picked).__name__}); return tensors, in containers, or in attributes of one object"
        )
    return roots


def refuse_iterators(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError for an input that can be read once only: the observed step would leave nothing of it."""
    for value in tree_leaves((args, dict(kwargs))):
        if isinstance(value, Iterator) and not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"observe: an input of {type(model).__name__} is a {type(value).__name__}, which can be read once, and "
                "the observed step reads it too; pass a list or a tuple"
            )


def _call(model: nn.Module, batch: Any) -> Any:
    if not isinstance(batch, Mapping | tuple):
        raise ConfigError(
            "observe: batch must be a mapping (model(**batch)), a tuple (model(*batch)) or a function that returns the "
            f"loss, not {'Tensor; write (tensor,)' if isinstance(batch, torch.Tensor) else type(batch).__name__}"
        )
    args: tuple = () if isinstance(batch, Mapping) else batch
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    refuse_iterators(model, args, kwargs)
    try:
        return model(*args, **kwargs)
    except _DID_NOT_FIT as error:
        if isinstance(error, ConfigError | torch.OutOfMemoryError) or _OUT_OF_MEMORY in str(error):
            raise
        reason = f"{type(error).__name__}: {error}".strip()
        raise ConfigError(
            f"observe: the batch does not fit the model: {type(model).__name__}({describe(args, kwargs)}) "
            f"raised {reason}"
        ) from error


def _scalar(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    picked = _pick(output) if loss is None else loss(output)
    if not isinstance(picked, torch.Tensor):
        where = "loss(output)" if loss is not None else "the output"
        raise ConfigError(
            f"observe: {where} is no loss but {type(picked).__name__}; return a scalar tensor, an output with `.loss`, "
            "or say how to get it with loss="
        )
    if picked.numel() != 1:
        raise ConfigError(
            f"observe: the loss must be one number, not a tensor of shape {list(picked.shape)}; reduce it (`.mean()`), "
            "or say how with loss="
        )
    if not picked.requires_grad:
        raise ConfigError("observe: the loss does not depend on anything that requires a gradient")
    return picked


def _pick(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    found = getattr(output, "loss", None)
    return output if found is None else found


def _leaves_inside(roots: list[torch.Tensor], known: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves that the forward pass itself has made (`detach().requires_grad_()`): their gradients stay as well."""
    leaves = (node.variable for node in nodes_between(roots, ()) if node.name() == ACCUMULATOR)
    have = {id(tensor) for tensor in known}
    return list({id(leaf): leaf for leaf in leaves if id(leaf) not in have}.values())


def _backward(roots: list[torch.Tensor], trained: list[torch.Tensor], accumulates: bool) -> Sequence:
    ones = None if len(roots) == 1 and roots[0].numel() == 1 else [torch.ones_like(root) for root in roots]
    if accumulates:
        torch.autograd.backward(roots, ones)
        return [tensor.grad for tensor in trained]
    return torch.autograd.grad(roots, trained, ones, allow_unused=True)
