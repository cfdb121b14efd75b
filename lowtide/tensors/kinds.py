"""What counts as an activation: the questions that the observed step asks of a tensor, and the runtime asks again.

Cost: a few attribute reads a tensor. Not covered: where the tensor goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from lowtide.tensors.private import (
    MODULE_TABLES,
    FakeTensor,
    OpOverload,
    is_transformed,
    is_zero_tensor,
    own_buffers,
    own_modules,
    own_parameters,
    schema_of,
    sequence_number,
    storage_key,
    tree_leaves,
    version_of,
)
from lowtide.tensors.wrappers import inside

PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})

CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")
"""Keyword inputs that are key-value caches."""

# A cast or a view of a parameter is a few nodes away from its accumulator, never more.
_MAX_STEPS_TO_PARAMETER = 4
ACCUMULATOR = "torch::autograd::AccumulateGrad"
_VIEWS_AND_CASTS = (
    "TBackward",
    "ToCopyBackward",
    "TransposeBackward",
    "ViewBackward",
    "PermuteBackward",
)


def is_plain_or_fake(tensor: torch.Tensor) -> bool:
    """A dense, strided tensor with a storage (a fake one's has a size and no bytes), of no other subclass."""
    if is_plain(tensor):
        return True
    return type(tensor) is FakeTensor and tensor.layout is torch.strided


def written_arguments(op: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to. One of higher order has no schema that says so."""
    if not isinstance(op, OpOverload) or not schema_of(op).is_mutable:
        return []
    arguments = schema_of(op).arguments
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    is_written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return tensors_in([by_name.get(name) for name in is_written])


def leads_to_parameter(tensor: torch.Tensor) -> bool:
    """Whether autograd's own record says that `tensor` is a view or a cast of a parameter."""
    node = tensor.grad_fn
    for _ in range(_MAX_STEPS_TO_PARAMETER):
        if node is None:
            return False
        name = node.name()
        if name == ACCUMULATOR:
            return isinstance(getattr(node, "variable", None), nn.Parameter)
        if not name.startswith(_VIEWS_AND_CASTS):
            return False
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def nodes_between(outputs: Iterable[torch.Tensor], stops: Iterable[Any], since: int = 0) -> Iterator[Any]:
    """Autograd's nodes that gave `outputs`, each once, in the order of a walk that begins at the outputs and goes
    neither past the nodes `stops` nor to those with a lower number than `since`. Two runs of the same code give nodes
    of the same classes in the same order.

    Cost: about 1 us a node.
    """
    # Held: an object made for this walk alone would give its identity to the next one.
    seen = {id(stop): stop for stop in stops}
    pending = [tensor.grad_fn for tensor in outputs]
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen or (since and sequence_number(node) < since):
            continue
        seen[id(node)] = node
        yield node
        pending += [following for following, _ in node.next_functions]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of containers within containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensors_returned(output: Any) -> list[torch.Tensor]:
    """The tensors in what a model returns. An object of its own (a dataclass) is no container to torch: its attributes
    are looked at."""
    return tensors_in(output) or tensors_in(getattr(output, "__dict__", None))


def plain_inside(tree: Any) -> list[torch.Tensor]:
    """The plain tensors among those leaves, and inside of the wrappers among them."""
    return [local for local in map(inside, tensors_in(tree)) if is_plain(local)]


def storage_key_set(tree: Any) -> set[int]:
    return set(ordered_storage_keys(tree))


def ordered_storage_keys(tree: Any) -> list[int]:
    return list(dict.fromkeys(storage_key(leaf.untyped_storage()) for leaf in tensors_in(tree) if is_plain(leaf)))


def is_plain(tensor: torch.Tensor) -> bool:
    """A dense, strided tensor with real storage, of no subclass but Parameter.

    Two kinds have the type and no bytes: zeros that forward-mode derivatives never fill in (a size, and no memory), and
    what torch.func puts around a tensor (no storage at all). Asking costs 0.2 us.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not is_zero_tensor(tensor)
        and not is_transformed(tensor)
    )


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a plain tensor may leave `device` and come back as a view of the same bytes."""
    # Conjugate and negative bits are not part of a storage view; such tensors are rare, small, and stay.
    return (
        is_plain(tensor)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() > 0
        and tensor.device == device
    )


def can_be_cloned(tensor: torch.Tensor) -> bool:
    """False for one kind of quantized tensor (scales and zero points that are floats, as of embeddings): torch has no
    `clone` of it."""
    return not tensor.is_quantized or tensor.qscheme() is not torch.per_channel_affine_float_qparams


def storage_keys(module: nn.Module) -> set[int]:
    """Addresses of the storages of a module's parameters and buffers; of distributed ones, of this rank's part."""
    tensors = map(inside, tensors_of(module))
    return {storage_key(tensor.untyped_storage()) for tensor in tensors if is_plain(tensor)}


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a module. Faster than `module.parameters()`, for what is looked at in every pass. One
    that stands in several places is there several times."""
    tables = (table.values() for each in modules_of(module) for table in (own_parameters(each), own_buffers(each)))
    return [tensor for tensor in chain.from_iterable(tables) if tensor is not None]


def num_cached(module: nn.Module, cache: Any) -> int:
    """Tokens that a key-value cache holds for the layer `module`. Of a layer that keeps no tokens in it (linear
    attention, keys of another layer): the tensors of its state."""
    numbers = (getattr(each, "layer_idx", None) for each in (module, *module.children()))
    index = next((number for number in numbers if isinstance(number, int)), 0)
    layers = getattr(cache, "layers", ())
    if index < len(layers) and not hasattr(layers[index], "get_seq_length"):
        return len(tensors_in(vars(layers[index])))
    length = getattr(cache, "get_seq_length", None)
    return int(length(index)) if callable(length) else len(cache)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is; the host for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def versions_of_parameters(module: nn.Module) -> list[int]:
    """How often each of its parameters has been written to in place; those of inference mode cannot be."""
    return [0 if parameter.is_inference() else version_of(parameter) for parameter in module.parameters()]


def unregistered_in(module: nn.Module) -> list[nn.Module]:
    """Modules that stand in a list, tuple, set or dictionary of a module's attributes and are no children, as a
    teacher does that must not be trained or saved along."""
    held: list[nn.Module] = []
    for each in modules_of(module):
        for name, value in [*vars(each).items()]:
            if name not in MODULE_TABLES and isinstance(value, list | tuple | set | dict):
                inside_of = value.values() if isinstance(value, dict) else value
                held += [one for one in inside_of if isinstance(one, nn.Module)]
    return held


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all that are inside of it, each once. Faster than `module.modules()`: layers are walked in every
    pass."""
    found, seen = [module], {module}
    for each in found:
        for child in own_modules(each).values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def swapped_weights_of(model: nn.Module) -> Any:
    """The handle of a model's weights that come and go: `moves` says which do, `hold` gives handles on saved tensors
    that show one. None where all stay. It is found by the forwards that stand around the model's own."""
    forward = vars(model).get("forward")
    while forward is not None:
        if getattr(forward, "weights", None) is not None:
            return forward.weights
        forward = getattr(forward, "__wrapped__", None)
    return None
