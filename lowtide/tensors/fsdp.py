"""FSDP2 models in an observed step: what is gathered when, and no trace of the step in what FSDP2 remembers.

What: `fully_shard` keeps each parameter as a shard (a DTensor) and, from a module's forward or backward hooks, puts a
plain *gathered* parameter in its place for a while. Its storage is always the same one: emptied (`resize_(0)`) when the
module is done, filled again before the next use. `at_rest` brings a model into the state between two steps and finds
the gathered parameters (each module is gathered and resharded once); inside, a whole step may run, with FSDP2's own
hooks and collectives; afterwards gradients, partial sums and the state of every module are what they were.

Beside tensor parallelism (`parallelize_module` first, `fully_shard` after it) the gathered parameter is a DTensor too,
over the tensor-parallel ranks alone: of the plain tensor inside it the same holds. Hybrid sharding (a mesh of two
dimensions) only adds a sum over replicas.

Collective: all ranks come to it together, and run the same step inside.
Cost: one more all-gather of each parameter. Not covered: float8 and other parameters that bring an all-gather of their
own.

FSDP2 has no public way to ask whether a forward pass is under way, or for gradients that it has not reduced yet; what
is read instead stands in tensors/private.py.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.tensors.private import (
    FSDP_PARTIAL_SUM,
    FSDP_RESHARDS,
    fsdp_context,
    fsdp_groups,
    fsdp_state,
    gathered_parameter,
    gradient_hooks,
    is_fsdp_root,
)


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    found = sys.modules.get("torch.distributed.fsdp")
    return found is not None and isinstance(module, found.FSDPModule)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules of `model` on which `fully_shard` was called, outer ones first."""
    return [module for module in model.modules() if is_fsdp(module)]


def is_sharded(tensor: torch.Tensor) -> bool:
    """A DTensor."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a DTensor; any other tensor itself. Collective over the ranks that have its parts."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def sharded_parameters(model: nn.Module) -> set[int]:
    """Identities of the parameters that FSDP2 holds as shards; a DTensor of tensor parallelism alone is not one."""
    return {id(parameter.sharded_param) for parameter in _parameters(model)}


def is_cut_twice(model: nn.Module) -> bool:
    """Whether FSDP2 holds shards of parameters that tensor parallelism had cut before."""
    return any(_known(attrgetter("is_dtensor"), parameter) for parameter in _parameters(model))


def _parameters(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each parameter of `model`."""
    groups = [group for module in fsdp_modules(model) for group in _known(fsdp_groups, module)]
    return [parameter for group in groups for parameter in group.fsdp_params]


def whole_bytes(model: nn.Module) -> tuple[int, int, int]:
    """Of all that FSDP2 shards in `model`, in bytes: its weights while they are gathered; how much larger its gradients
    are before they are reduced; and the buffers beside both, at the worse of two moments: all modules are gathered and
    there are no gradients yet, or one module after the other lets go of its weights and is reduced. Collective: gathers
    each module."""
    weights, gradients, more, gathers, reduces = 0, 0, 0, 0, [0]
    for module in fsdp_modules(model):
        module.unshard()
        for group in _known(fsdp_groups, module):
            reduces.append(0)
            for parameter in group.fsdp_params:
                whole, shard = local_part(parameter.unsharded_param), local_part(parameter.sharded_param)
                weights += whole.untyped_storage().nbytes()
                # All shards, which are padded, and a copy of this one.
                num_sent = shard.untyped_storage().nbytes() // shard.element_size() * (_num_shards(parameter) + 1)
                gathers += num_sent * whole.element_size()
                if whole.requires_grad:
                    itemsize = (group.mp_policy.reduce_dtype or whole.dtype).itemsize
                    gradients += whole.numel() * itemsize
                    more += max(0, whole.numel() * itemsize - shard.untyped_storage().nbytes())
                    reduces[-1] += num_sent * itemsize - whole.untyped_storage().nbytes()
        module.reshard()
    return weights, more, max(0, gathers - gradients, *reduces)


def _num_shards(parameter: Any) -> int:
    shard, whole = parameter.sharded_param, parameter.unsharded_param
    sizes = (size for size, place in zip(shard.device_mesh.shape, shard.placements) if place.is_shard())
    return math.prod(sizes) // (whole.device_mesh.size() if is_sharded(whole) else 1)


def unreduced_gradients(model: nn.Module) -> list[torch.Tensor]:
    """What FSDP2 has added up, of whole parameters, and not reduced yet."""
    found = []
    for parameter in _parameters(model):
        gathered = gathered_parameter(parameter)
        found += [parameter.unsharded_accumulated_grad, None if gathered is None else gathered.grad]
    return [gradient for gradient in found if gradient is not None]


def is_gathered_of(gathered: torch.Tensor, shard: torch.Tensor) -> bool:
    """Whether the one may be what FSDP2 gathers the other into: a plain tensor, or with tensor parallelism a DTensor
    over fewer dimensions of ranks."""
    return is_sharded(shard) and (not is_sharded(gathered) or _num_dims(gathered) < _num_dims(shard))


def _num_dims(tensor: Any) -> int:
    return int(tensor.device_mesh.ndim)


@contextlib.contextmanager
def at_rest(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, the model is between two steps and has no gradients; afterwards it is as it was.

    Gives the gathered parameters by name, empty outside of their module's forward and backward; without FSDP2 nothing
    happens, and there are none. Hooks on gradients (an optimizer in the backward pass) do not run inside. Raises
    ConfigError inside a forward pass of a larger FSDP2 model.
    """
    modules = fsdp_modules(model)
    if not modules:
        yield {}
        return
    _refuse_inside_a_forward(modules)
    gathered_before = [module for module in modules if _reshard(module)]
    gathered = _gather_each(model, modules)
    try:
        with _set_aside(model, modules, gathered):
            try:
                yield gathered
            except BaseException:
                for module in modules:
                    if is_fsdp_root(module) and hasattr(module, "reset_iter_state"):
                        module.reset_iter_state()
                raise
    finally:
        for module in gathered_before:
            module.unshard()


def _refuse_inside_a_forward(modules: list[Any]) -> None:
    if any(_known(fsdp_context, module).iter_forward_root is not None for module in modules):
        raise ConfigError(
            "observe: this model was called inside the forward pass of a larger model that FSDP2 shards; give lowtide "
            "that larger model"
        )


def _reshard(module: Any) -> bool:
    """Reshard a module; whether there was anything to do."""
    before = [id(parameter) for parameter in module.parameters()]
    module.reshard()
    return before != [id(parameter) for parameter in module.parameters()]


def _gather_each(model: nn.Module, modules: list[Any]) -> dict[str, torch.Tensor]:
    sharded = dict(model.named_parameters(remove_duplicate=False))
    gathered: dict[str, torch.Tensor] = {}
    for module in modules:
        module.unshard()
        named = model.named_parameters(remove_duplicate=False)
        gathered.update((name, parameter) for name, parameter in named if parameter is not sharded[name])
        module.reshard()
    return gathered


@contextlib.contextmanager
def _set_aside(model: nn.Module, modules: list[Any], gathered: dict[str, torch.Tensor]) -> Iterator[None]:
    """Gradients, whole and partial, their hooks, and whether the next backward is the last: set aside inside."""
    tensors = [*(p for p in model.parameters() if p.requires_grad), *gathered.values()]
    gradients = [(tensor, tensor.grad) for tensor in tensors]
    # The mappings themselves stay: whoever registered a hook removes it there.
    all_hooks = [(hooks, dict(hooks)) for tensor in tensors if (hooks := gradient_hooks(tensor))]
    groups = [group for module in modules for group in fsdp_groups(module)]
    partial = [(parameter, "unsharded_accumulated_grad") for group in groups for parameter in group.fsdp_params]
    partial += [(group, FSDP_PARTIAL_SUM) for group in groups]
    wanted: list[tuple[Any, str, Any]] = [(owner, name, None) for owner, name in partial if hasattr(owner, name)]
    contexts = {id(context): context for context in map(fsdp_context, modules)}
    wanted += [(context, "is_last_backward", True) for context in contexts.values()]
    attributes = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
    for tensor, _ in gradients:
        tensor.grad = None
    for hooks, _ in all_hooks:
        hooks.clear()
    for owner, name, value in wanted:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for hooks, before in all_hooks:
            hooks.update(before)
        for owner, name, value in attributes:
            setattr(owner, name, value)


def gathered_storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """The storages of gathered parameters, which FSDP2 empties and fills; those that exist yet."""
    found = map(gathered_parameter, _parameters(model))
    return [local_part(tensor).untyped_storage() for tensor in found if tensor is not None]


def after_forward(module: Any) -> list[tuple[Any, str, Any]]:
    """What decides whether an FSDP2 module reshards after its forward: (owner, attribute, value), to be set back.

    `set_reshard_after_forward` is public, but there is no way to ask for the setting. Raises ConfigError where this
    version of torch keeps it elsewhere.
    """
    state, groups = _known(fsdp_state, module), _known(fsdp_groups, module)
    places = [(state, FSDP_RESHARDS), *((group, "post_forward_mesh_info") for group in groups)]
    try:
        return [(owner, name, getattr(owner, name)) for owner, name in places]
    except AttributeError as error:
        raise _unknown_fsdp(error) from None


def _known(ask: Callable[[Any], Any], module: Any) -> Any:
    try:
        return ask(module)
    except AttributeError as error:
        raise _unknown_fsdp(error) from None


def _unknown_fsdp(error: AttributeError) -> ConfigError:
    return ConfigError(
        f"lowtide: FSDP2 of torch {torch.__version__} is not known here ({error}); use lowtide.apply with rules, or "
        "another version of torch"
    )
