"""The layers of a model in blocks of a declared number of rows: all but attention itself, which takes all rows at once.

Why: with logits and MLPs gone, norms, rotary positions and projections set the floor of long sequences, and what each
layer saves sets what the host must take: 84 KiB a token and layer in Llama-3-8B. Here a layer saves its input, what
attention reads and what it gives: 28 KiB.

How: attention is where a layer calls torch's `scaled_dot_product_attention`. All that a layer does before that call is
one function of rows, all that it does after it is another (blocks.py); no family of models is known by name. For a
block of rows the layer's own forward runs up to the call and stops there, and what the call was given is collected.
Then attention runs once, on all rows, and autograd sees it as always. For what comes after it the layer's own forward
runs once more on each block, and the call gives the block's rows of what attention has made.
Attention runs on a group of heads after the other, up to four groups: heads are independent, so bits are those of all
at once, its kernels take a quarter for themselves, and what they read and give comes and goes by group.
A layer that does not call attention is one function of rows, and so are norms beside the layers, or in place of both
whatever modules a user declares row-wise (`memory.row_wise`), with several tensors in and out.

Which sum: that of blocks.py, for all weights of a layer; one that has a part before attention and after it has both,
added up. Rows are those of all sequences of a batch, one after the other. A batch of one block goes through the model's
own forward, and has plain's bits.

Why it is safe: that rows do not talk to each other is tried out in each layer's first forward pass. A few rows run
three times, with the first one exchanged, and the last one; all others must keep their bits. And the first and the last
rows of a whole block must be, but for rounding, what they are alone: a layer that counts places from the beginning of
what it is given would begin anew in each block. A trace shows it of declared modules by shapes (`RowsApart`).
Cost: what stands before attention runs four times in a step and not once, the rest of the layer twice; at the lengths
that this is for, attention takes most of the time. Memory: a block's activations, and an fp32 sum for each weight of
one layer.
Refused by name: attention that is not torch's, or has a mask; softmax elsewhere; experts; hooks on parts of a layer;
caches; arguments that have no row for each token; dropout (where it draws), what writes to its input or moves state,
compiled parts, sharded weights, second derivatives.
Not covered: rows that talk to each other over more than some rows only.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide.core.rules import Pattern
from lowtide.errors import ConfigError
from lowtide.loss.blocks import RowsApart, RowWise, name_at_once
from lowtide.tensors.compiled import has_compiled
from lowtide.tensors.kinds import CACHE_NAMES, num_cached, tensors_in
from lowtide.tensors.private import (
    FakeTensor,
    are_transforms_active,
    base_of,
    disable_current_modes,
    has_hooks,
    is_forward_mode,
    tree_leaves,
    tree_map_only,
    version_of,
)
from lowtide.tensors.snapshot import take
from lowtide.tensors.view import same_bytes
from lowtide.tensors.wrappers import is_distributed

_FIX = "leave memory.rows out, or name what it may take with memory.row_wise"
_WHAT = "a layer in blocks"
_NUM_TRIED = 8
_ROUNDINGS = 32
"""In steps of the dtype at the largest number: what another order of sums changes at most."""
_SHARE_THAT_DIFFERS = 1 / 16
"""Of the numbers of a few rows, beyond roundings: not by chance."""
_MOST_GROUPS = 4
_SETTING = ("attn_mask", "dropout_p", "is_causal")
"""The arguments of attention after query, key and value that may be given by place."""
_PLAIN = (bool, int, float, str, type(None))
_SOFTMAX = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})


def take_layers_in_blocks(model: nn.Module, rows: int, row_wise: Sequence[str] = ()) -> Callable[[], None]:
    """Take the modules that `row_wise` names by patterns in blocks of `rows`, until what is returned is called; without
    patterns the layers of the model, and norms beside them. Raises `ConfigError` where there is none, and for modules
    that are known not to be functions of rows."""
    layers = _taken(model, row_wise)
    if not layers:
        raise ConfigError(
            f"memory.rows: {type(model).__name__} has no layers in a torch.nn.ModuleList, which could be taken in "
            f"blocks of rows; {_FIX}"
        )
    for name, layer in layers.items():
        if reason := _why_not(layer):
            raise _refusal(name, reason)
    for name, layer in layers.items():
        layer.forward = _LayerInBlocks(name, layer, rows, tuple(row_wise))

    def put_back() -> None:
        for layer in layers.values():
            if isinstance(vars(layer).get("forward"), _LayerInBlocks):  # nobody has set another since
                del layer.forward

    return put_back


def layer_rows_of(model: nn.Module) -> tuple[int | None, tuple[str, ...]]:
    """The rows of a block of a layer, where they are in force, and the patterns that name such modules."""
    forwards = (vars(module).get("forward") for module in model.modules())
    found = next((forward for forward in forwards if isinstance(forward, _LayerInBlocks)), None)
    return (None, ()) if found is None else (found.rows, found.row_wise)


def _taken(model: nn.Module, row_wise: Sequence[str]) -> dict[str, Any]:
    """The outermost modules that a pattern names, by name; without patterns those with parameters in lists of modules,
    and norms beside them."""
    modules = dict(model.named_modules())
    patterns = {text: Pattern.parse(text, where="memory.row_wise") for text in row_wise}
    for text, pattern in patterns.items():
        if not any(name and pattern.matches(name, is_site=False) for name in modules):
            raise ConfigError(f"memory.row_wise: '{text}' is no module of {type(model).__name__}")

    def is_asked(name: str, module: nn.Module) -> bool:
        if patterns:
            is_named = any(pattern.matches(name, is_site=False) for pattern in patterns.values())
            return is_named and type(module).forward is not nn.Module.forward
        parent, is_leaf = modules[name.rpartition(".")[0]], not any(True for _ in module.children())
        is_layer = isinstance(parent, nn.ModuleList) and not isinstance(module, nn.ModuleList)
        is_norm = is_leaf and has_lists and "Norm" in type(module).__name__
        return (is_layer or is_norm) and any(True for _ in module.parameters())

    has_lists = any(isinstance(each, nn.ModuleList) for each in modules.values())
    asked = {name: each for name, each in modules.items() if name and is_asked(name, each)}
    return {name: each for name, each in asked.items() if not any(name.startswith(f"{other}.") for other in asked)}


def _why_not(layer: Any) -> str:
    if "forward" in vars(layer):
        return "somebody has replaced its forward"
    if any(is_distributed(parameter) for parameter in layer.parameters()):
        return "its weights are spread over ranks"
    if any(hasattr(part, "experts") for part in layer.modules()):
        return "it routes tokens to experts"
    if has_compiled(layer):
        return "a part of it is compiled"
    if any(has_hooks(part) for part in layer.modules() if part is not layer):
        return "there are hooks on its parts, which would see blocks"
    return ""


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"memory.rows: '{name}' cannot be taken in blocks of rows: {reason}; {_FIX}")


class _LayerInBlocks:
    """The forward of one layer."""

    def __init__(self, name: str, layer: Any, rows: int, row_wise: tuple[str, ...]) -> None:
        self.rows = rows
        self.row_wise = row_wise
        self._name = name
        self._layer = layer
        self._body = _Body(layer)
        self._tried: set[tuple[Any, ...]] = set()
        """Which of its parts were in training, and what they were given beside tensors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        is_one_block = isinstance(x, torch.Tensor) and math.prod(x.shape[:-1]) <= self.rows
        if is_one_block or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return type(self._layer).forward(self._layer, *args, **kwargs)
        if getattr(self._layer, "gradient_checkpointing", False) and self._layer.training:
            # Of transformers' layers the class's own forward is the checkpoint, and would hold each block.
            raise _refusal(self._name, "transformers checkpoints it (call model.gradient_checkpointing_disable())")
        if not isinstance(x, torch.Tensor) or is_distributed(x) or not x.is_floating_point():
            raise _refusal(self._name, "its first argument is no ordinary tensor of floating-point numbers")
        if are_transforms_active() or is_forward_mode():
            raise _refusal(self._name, "torch.func and forward-mode derivatives are not covered")
        given = _Given(self._name, x, args, self._without_cache(kwargs))
        inputs = given.inputs_of(args, kwargs)
        before, after, _ = self._look(given, [each.detach() for each in inputs])
        weights = dict(self._body.named_parameters())
        # What is made before attention may be read after it too, so that all weights have a part in the rest.
        only_rest = after.read_after - before.read
        first = [name for name, weight in weights.items() if id(weight) not in only_rest]

        def run_first(part: slice, inputs: list[Any], leaves: list[Any]) -> tuple[torch.Tensor, ...]:
            parts = self._run(given, part, inputs, dict(zip(first, leaves, strict=True))).rows_given()
            groups = zip(*(each.chunk(_num_groups(parts), 1) for each in parts), strict=True)
            return tuple(each for group in groups for each in group)

        def run_rest(part: slice, inputs: list[Any], leaves: list[Any]) -> tuple[torch.Tensor, ...]:
            heads = inputs[given.num_inputs :]
            made = torch.cat(heads, 1) if heads else None
            return given.rows_of(self._run(given, part, inputs, dict(zip(weights, leaves, strict=True)), made).result)

        if before.given is not None:
            run = RowWise(run_first, self.rows, len(inputs), _WHAT, _FIX)
            parts = list(run(*inputs, *(weights[name] for name in first)))
            while parts:  # what attention has read goes before the blocks after it run
                inputs.append(_attend(given.lead, [parts.pop(0) for _ in range(3)], before.setting))
        run = RowWise(run_rest, self.rows, len(inputs), _WHAT, _FIX)
        rows = iter(run(*inputs, *weights.values()))
        wholes = (each.view(*given.lead, *each.shape[1:]) for each in rows)
        return tree_map_only(torch.Tensor, lambda _: next(wholes), after.result)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or a file of it, has its own forward: nobody would ever take a copied one off."""
        return getattr, (self._layer, "forward")

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Without an empty cache of keys and values, which models in training are given by default."""
        caches = [name for name in CACHE_NAMES if kwargs.get(name) is not None]
        if any(num_cached(self._layer, kwargs[name]) for name in caches):
            raise _refusal(self._name, f"its {caches[0]} already holds tokens")
        if caches:
            warnings.warn(
                f"lowtide: layers in blocks do not fill {', '.join(caches)}; set use_cache=False to say so yourself.",
                stacklevel=2,
            )
        return {**kwargs, **dict.fromkeys(caches)}

    def _run(self, given: _Given, part: slice, blocks: list[Any], weights: dict[str, Any], made: Any = None) -> _Seam:
        """The layer's own forward on a block; up to attention, or with the rows that it has `made`."""
        args, kwargs = given.of_block(part, blocks)
        if made is not None:
            made = made[None].transpose(1, 2)
        tensors = tensors_in((args, kwargs))
        versions = [version_of(each) for each in tensors]
        with _Seam(self._name, made, may_be_own=bool(self.row_wise)) as seam, contextlib.suppress(_StopError):
            seam.result = torch.func.functional_call(self._body, weights, args, kwargs)
        if versions != [version_of(each) for each in tensors]:
            raise _refusal(self._name, "it writes to what it is given")
        return seam

    def _look(self, given: _Given, inputs: list[torch.Tensor]) -> _Looked:
        """What the layer does with its first rows. Raises `ConfigError` where these talk to each other."""
        device = inputs[0].device.type
        cast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
        kind = (*(part.training for part in self._layer.modules()), *given.beside)
        is_new, is_fake = kind not in self._tried, isinstance(inputs[0], FakeTensor)
        state = take(self._layer, code=True, process=False) if is_new and not is_fake else None
        try:
            with torch.no_grad(), torch.autocast(device, **cast, cache_enabled=False):  # type: ignore[arg-type]
                if is_new and is_fake and self.row_wise:
                    # Shapes show where rows talk. Whoever records the trace does not see it.
                    fake: Any = inputs[0]
                    with disable_current_modes(), fake.fake_mode, RowsApart(partial(_refusal, self._name)):
                        many = [each.new_empty(RowsApart.num_rows, *each.shape[1:]) for each in inputs]
                        self._look_at(given, many, slice(0, RowsApart.num_rows))
                rows = [each[:_NUM_TRIED] if is_fake else each[:_NUM_TRIED].clone() for each in inputs]
                seen = self._look_at(given, rows, slice(0, len(rows[0])))
                if not is_fake and not seen[0].needing | seen[1].needing <= set(map(id, self._body.parameters())):
                    raise _refusal(self._name, "it reads a tensor that needs a gradient and is none of its parameters")
                if is_new and not is_fake:
                    self._try(given, inputs, rows, seen)
        except Exception as error:  # of whatever the module calls
            if state is not None:
                state.restore()
            if isinstance(error, ConfigError):
                raise
            text = f"with a few of its rows alone it raises {type(error).__name__}: {error}"
            raise _refusal(self._name, text) from error
        self._tried.add(kind)
        return seen

    def _try(self, given: _Given, inputs: list[torch.Tensor], rows: list[torch.Tensor], seen: _Looked) -> None:
        """Raises `ConfigError` where another run of a few rows, or a run of a whole block, shows that rows talk."""
        num_rows = len(rows[0])
        first = slice(0, num_rows)
        state = take(self._layer, code=True, process=False)
        versions = [version_of(each) for each, _ in state.tensors]
        for other, others in ((0, slice(1, None)), (num_rows - 1, slice(0, num_rows - 1))):
            changed = [each.clone() for each in rows]
            for each in changed:
                each[other] = 1 - each[other]
            again = self._look_at(given, changed, first)
            pairs = zip(seen[2], again[2], strict=True)
            if not all(same_bytes(a[others], b[others]) for a, b in pairs):
                raise _refusal(self._name, "what it gives for a row depends on other rows")
        moved = [str(record.name) for record in state.changed()]
        moved += [str(n) for (each, n), then in zip(state.tensors, versions, strict=True) if version_of(each) != then]
        if moved:
            raise _refusal(self._name, f"each run of it changes '{moved[0]}'")
        block = slice(0, max(self.rows, num_rows))
        last = slice(max(1, block.stop - num_rows), block.stop)
        whole = self._look_at(given, [each[block].clone() for each in inputs], block)
        for part, alone in ((first, seen), (last, self._look_at(given, [each[last].clone() for each in inputs], last))):
            pairs = zip(whole[2], alone[2], strict=True)
            if not all(_nearly(a[part], b) for a, b in pairs):
                raise _refusal(self._name, "what it gives for a row depends on the other rows of its block")

    def _look_at(self, given: _Given, rows: list[torch.Tensor], part: slice) -> _Looked:
        before = self._run(given, part, rows, {})
        after = before
        results: list[torch.Tensor] = []
        if before.given is not None:
            results += before.rows_given()
            _, _, value = before.given
            heads, width = before.given[0].shape[1], value.shape[3]
            # Any numbers will do, other ones in each row.
            made = rows[0].repeat(1, -(-heads * width // rows[0].shape[1]))[:, : heads * width].to(value.dtype)
            after = self._run(given, part, rows, {}, made.reshape(-1, heads, width))
            if before.setting.get("attn_mask") is not None:
                raise _refusal(self._name, "its attention has a mask")
            if share := before.setting.get("dropout_p"):
                raise _refusal(self._name, f"its attention drops out at random (p = {share})")
        results += given.rows_of(after.result, len(rows[0]))
        return before, after, results


class _Body(nn.Module):
    """The layer's own forward as a module, whose weights can be given for one call."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)


class _Given:
    """The arguments of a call, by rows. `x`: the hidden states."""

    def __init__(self, name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name = name
        self.lead = x.shape[:-1]
        self._ones = (1,) * max(0, x.ndim - 2)
        """What stands before the rows of a block: as many dimensions as the whole has there."""
        self.beside = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)]
        for leaf in self.beside:
            if not isinstance(leaf, _PLAIN):
                raise _refusal(name, f"it is given a {type(leaf).__name__} (for a cache: pass use_cache=False)")
        tensors = [x, *tensors_in((args, kwargs))]
        self._places = {id(each): torch.empty(0) for each in tensors if each is x or each.requires_grad}
        """In the place of the inputs, which autograd's graph must not hold twice."""
        self.num_inputs = len(self._places)

        def by_rows(tensor: torch.Tensor) -> torch.Tensor:
            return self._places[id(tensor)] if id(tensor) in self._places else self._rows_of(tensor)

        self._tree = tree_map_only(torch.Tensor, by_rows, (args, kwargs))

    def inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """By rows, what needs a gradient, the hidden states first."""
        tensors = {id(each): each for each in tensors_in((args, kwargs))}
        return [self._rows_of(tensors[key], is_input=True) for key in self._places]

    def of_block(self, part: slice, blocks: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for one block, whose rows of the inputs are `blocks`."""
        of_place = {id(place): rows for place, rows in zip(self._places.values(), blocks, strict=False)}

        def cut(rows: torch.Tensor) -> torch.Tensor:
            if id(rows) in of_place:
                rows = of_place[id(rows)]
            elif rows.ndim == 0:
                return rows
            elif part.stop <= len(rows):
                rows = rows[part]
            else:
                places = torch.arange(part.start, part.start + len(blocks[0]), device=rows.device)
                rows = rows[places % len(rows)]
            return rows[(None,) * len(self._ones)]

        args, kwargs = tree_map_only(torch.Tensor, cut, self._tree)
        return args, kwargs

    def rows_of(self, result: Any, num_rows: int | None = None) -> tuple[torch.Tensor, ...]:
        """What a block gave, by rows."""
        leaves = [leaf for leaf in tree_leaves(result) if leaf is not None]
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise _refusal(self._name, f"it gives a {type(leaf).__name__}")
            if num_rows is not None and leaf.shape[: len(self._ones) + 1] != (*self._ones, num_rows):
                raise _refusal(self._name, f"it gives a tensor {_without_rows(leaf)}")
        return tuple(leaf[(0,) * len(self._ones)] for leaf in leaves)

    def _rows_of(self, tensor: torch.Tensor, *, is_input: bool = False) -> torch.Tensor:
        """A row for each token of the batch, or of one sequence, where all sequences have the same. A number, such as
        transformers' num_items_in_batch, is for all rows."""
        if tensor.ndim == 0 and not is_input:
            return tensor
        lead, rest = tensor.shape[: len(self.lead)], tensor.shape[len(self.lead) :]
        if lead != self.lead and lead != (1, *self.lead[1:]):
            raise _refusal(self._name, f"it is given a tensor {_without_rows(tensor)}")
        if is_input and lead != self.lead:
            tensor = tensor.expand(*self.lead, *rest)
        return tensor.reshape(-1, *rest)


class _StopError(Exception):
    """Ends a layer's forward at attention."""


class _Seam(TorchFunctionMode):
    """Stands where a layer calls attention. `made`: what the call gives; None: the layer stops there. `may_be_own`: a
    softmax may be something else than attention."""

    def __init__(self, name: str, made: torch.Tensor | None, *, may_be_own: bool) -> None:
        super().__init__()
        self._may_be_own = may_be_own
        self._name = name
        self._made = made
        self.given: tuple[torch.Tensor, ...] | None = None
        self.setting: dict[str, Any] = {}
        self.result: Any = None
        self.read: set[int] = set()
        """Tensors that were read up to attention, by id: those of them that are weights live as long as the layer."""
        self.read_after: set[int] = self.read
        self.needing: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            if func is F.dropout and (share := _dropped_by(args, kwargs)) is not None:
                raise _refusal(self._name, f"it drops out at random (p = {share})")
            if func in _SOFTMAX and not self._may_be_own:
                raise _refusal(
                    self._name, "its attention is not torch's scaled_dot_product_attention (attn_implementation='sdpa')"
                )
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.read_after.update(map(id, tensors))
            if func.__name__ != "__get__":  # of an attribute, such as a dtype
                bases = [(each, base_of(each)) for each in tensors if each.requires_grad]
                self.needing.update(id(each if base is None else base) for each, base in bases)
            return func(*args, **kwargs)
        if self.given is not None:
            raise _refusal(self._name, "it calls attention twice")
        named = {**dict(zip(("query", "key", "value", *_SETTING), args, strict=False)), **kwargs}
        self.given = tuple(named.pop(each) for each in ("query", "key", "value"))
        self.setting = named
        if self._made is None:
            raise _StopError
        self.read_after = set()
        return self._made

    def rows_given(self) -> tuple[torch.Tensor, ...]:
        """What attention was given, by rows."""
        if self.given is None:
            raise _refusal(self._name, "it calls attention for some rows only")
        return tuple(each.transpose(1, 2).flatten(0, 1) for each in self.given)


_Looked = tuple[_Seam, _Seam, list[torch.Tensor]]
"""What a layer did with a few rows: up to attention; after it (the same where there is none); and by rows what
attention was given, and what the layer gave."""


def _dropped_by(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The share that a call of `dropout` drops; None where it drops nothing."""
    named = {"p": 0.5, "training": True, **dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    return named["p"] if named["p"] and named["training"] else None


def _without_rows(tensor: torch.Tensor) -> str:
    return f"of shape {tuple(tensor.shape)}, which has no row for each token"


def _attend(lead: torch.Size, parts: list[torch.Tensor], setting: dict[str, Any]) -> torch.Tensor:
    """What attention gives for a group of heads, by rows. `parts`: its query, key and value, likewise."""
    query, key, value = (each.view(*lead, *each.shape[1:]).transpose(1, 2) for each in parts)
    made = F.scaled_dot_product_attention(query, key, value, **setting).transpose(1, 2)
    rows = made.reshape(-1, *made.shape[2:])
    if not made.is_contiguous():  # a copy
        name_at_once(rows)
    return rows


def _num_groups(parts: tuple[torch.Tensor, ...]) -> int:
    """Of heads: each group has the same share of query, key and value, which are rows x heads x width."""
    heads = [each.shape[1] for each in parts]
    return next(count for count in range(_MOST_GROUPS, 0, -1) if not any(each % count for each in heads))


def _nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same but for roundings."""
    if same_bytes(one, other):
        return True
    largest = one.abs().max().double()
    limit = float(largest) * _ROUNDINGS * torch.finfo(one.dtype).eps
    is_close = torch.isclose(one.double(), other.double(), rtol=0.0, atol=limit, equal_nan=True)
    return float((~is_close).double().mean()) <= _SHARE_THAT_DIFFERS
