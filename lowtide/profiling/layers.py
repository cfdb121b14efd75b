"""Which modules of a model are its layers: the repeated blocks that plans speak of.

A layer is a child of a `ModuleList` or `Sequential` in which at least two children share a class and hold parameters,
or the only such child of a `ModuleList` (a model of one layer, or one that calls its layer several times). A
`ModuleDict` whose keys are numbers, as pipeline stages have, counts as a `ModuleList`. The outermost such container
wins: what repeats inside a layer (experts, heads) belongs to that layer. Layers whose classes differ within one list
(dense and MoE blocks) are layers all the same, as long as the list repeats something.

A compiled block is a layer like any other; what repeats inside a compiled module is not, because that module is one
node.

Cost: one walk over the modules. Not covered: blocks held in plain attributes (`self.down1`, `self.down2`), which the
user names with `layers:`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from lowtide.errors import ConfigError, did_you_mean
from lowtide.tensors.compiled import compiled_parts, how_compiled, lies_in
from lowtide.tensors.kinds import is_plain_or_fake, swapped_weights_of
from lowtide.tensors.private import inside_wrapper_of_compiled, is_wrapper_of_compiled, storage_key
from lowtide.tensors.view import Shape

MIN_BYTES = 64 * 1024
"""Smaller weights stay on the device."""


def find_layers(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the layers of `model`, in the order of definition. Empty if nothing repeats. A layer that stands
    in several places has the name that `named_modules` gives it."""
    names: list[str] = []
    _walk(model, "", names)
    first_names = dict(model.named_modules())
    return tuple(name for name in names if name in first_names)


def named_layers(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """The user's own list of layers, checked. Raises ConfigError for an unknown module, or one inside another."""
    modules = dict(model.named_modules())
    compiled = compiled_parts(model)
    for name in names:
        part = lies_in(name, compiled)
        if part is not None:
            raise ConfigError(
                f"memory.layers: '{name}' lies inside '{part}', which is compiled, and so one node; name '{part}'"
            )
        if name not in modules:
            raise ConfigError(f"memory.layers: '{name}' is no module of this model{did_you_mean(name, modules)}")
        for other in names:
            if name.startswith(other + "."):
                raise ConfigError(f"memory.layers: '{name}' lies inside '{other}'; a layer cannot contain another")
    return tuple(names)


def is_numbered(module: nn.Module) -> bool:
    """Is it a dictionary of modules whose keys are numbers: those that layers have in the whole model?"""
    return isinstance(module, nn.ModuleDict) and len(module) > 0 and all(key.isdecimal() for key in module)


def layer_weights(model: nn.Module, layers: Sequence[str]) -> dict[str, int]:
    """Bytes of the weights of each layer that may be elsewhere until its turn."""
    counts, modules, swapped = times_used(model), dict(model.named_modules()), swapped_weights_of(model)

    def moves(parameter: nn.Parameter) -> bool:
        return can_move(parameter, MIN_BYTES, counts) if swapped is None else swapped.moves(parameter)

    return {name: sum(p.nbytes for p in modules[name].parameters() if moves(p)) for name in layers}


def times_used(model: nn.Module) -> Counter[int]:
    """How many parameters lie in each storage."""
    return Counter(storage_key(p.untyped_storage()) for p in model.parameters() if is_plain_or_fake(p))


def can_move(parameter: nn.Parameter, least_bytes: int, counts: Counter[int]) -> bool:
    """Whether a weight may be elsewhere until its turn: it is plain, not small, and alone in its memory."""
    if not is_plain_or_fake(parameter) or parameter.nbytes < least_bytes:
        return False
    storage, shape = parameter.untyped_storage(), Shape.of(parameter)
    is_alone = storage.nbytes() == parameter.nbytes == shape.end_bytes() and shape.offset == 0
    return is_alone and counts[storage_key(storage)] == 1


def _walk(module: nn.Module, prefix: str, names: list[str]) -> None:
    if how_compiled(module) is not None:
        return  # one node, whatever repeats inside
    children = list(module.named_children())
    if (isinstance(module, nn.ModuleList | nn.Sequential) or is_numbered(module)) and _repeats(module):
        names.extend(f"{prefix}{name}" for name, child in children if _has_parameters(child))
        return
    for name, child in children:
        _walk(child, f"{prefix}{name}.", names)


def _repeats(container: nn.Module) -> bool:
    classes = Counter(type(_plain(child)) for child in container.children() if _has_parameters(child))
    if not classes:
        return False
    is_single = not isinstance(container, nn.Sequential) and classes.total() == 1
    return is_single or classes.most_common(1)[0][1] >= 2


def _plain(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, for what it gave out; else the module itself."""
    return inside_wrapper_of_compiled(module) if is_wrapper_of_compiled(module) else module


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
