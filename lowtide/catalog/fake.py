"""`trace`: the profile of a step that never runs. No weights, no device, any size of model.

What: the same observation as observe.py under fake tensors: shapes, strides and storages are real, bytes are not there.
Lifetimes and bytes are exact; times are a roofline's, for a device that need not be here. The model may be real (its
parameters are lent fake ones for the time of the trace), on the meta device, or described by a config.

Of layers that are equal only three are traced and the rest copied (repeats.py, expand.py): a model of 671 B parameters
takes seconds.

Differences from a real run that the trace bridges: attention that the host would not fuse (planning_attention.py), and
expert loops that look at values, which transformers can replace by grouped products.

Cost: about 0.3 ms an operator that is traced. Not covered: control flow that depends on data (an error that says
where), sharded parameters, and fake accelerator tensors: a build of torch without that device aborts the process on
them, so everything is traced as if on the host.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.catalog.assemble import Recipes, profile_of, with_recipes
from lowtide.catalog.cost import op_seconds
from lowtide.catalog.expand import Expanded, expand
from lowtide.catalog.graph import Call
from lowtide.catalog.layers import find_layers
from lowtide.catalog.observe import input_bytes, record_step, wants_accumulation
from lowtide.catalog.observer import Observer
from lowtide.catalog.parking import FakePark
from lowtide.catalog.planning_attention import fused_attention as fused
from lowtide.catalog.repeats import CannotSkipError, Run, find_runs, skipping
from lowtide.catalog.site import Profile
from lowtide.catalog.state_bytes import state_bytes
from lowtide.catalog.trace import is_plain
from lowtide.errors import ConfigError
from lowtide.timeline.hardware import Hardware

_LOOKS_AT_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_REAL_BYTES = 2**20


def trace(
    model: nn.Module,
    batch: Any,
    *,
    hardware: Hardware,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    layers: tuple[str, ...] | None = None,
    needs_scalar: bool = True,
    fused_attention: bool | None = None,
    skips_equal_layers: bool = True,
) -> Profile:
    """The profile of one forward and backward of `model` on `batch`, timed by the roofline of `hardware`.

    `batch`, `loss` and `needs_scalar` are those of `observe`; only shapes and dtypes matter. `fused_attention` says
    whether the device fuses attention that the host would not; None: every device but the host does.

    Raises ConfigError for what `observe` raises it for, and for a model whose control flow depends on data.
    """
    names = find_layers(model) if layers is None else layers
    is_host = hardware.name.startswith("cpu")
    is_fused = not is_host if fused_attention is None else fused_attention
    is_callable = callable(batch) and not isinstance(batch, dict | tuple)
    runs = find_runs(model, names) if skips_equal_layers and not is_callable else ()
    accumulates = False
    while True:
        setting = _Setting(hardware, names, needs_scalar, is_fused, runs, accumulates)
        try:
            expanded, shapes = _trace(model, batch, loss, setting)
            break
        except CannotSkipError:
            runs = ()
        except RuntimeError as error:
            if accumulates or not wants_accumulation(error):
                raise
            accumulates = True
    return profile_of(
        expanded.trace,
        expanded.nodes,
        Recipes(expanded.recipes, {}),  # a trace on one process sees no collective
        model=type(model).__name__,
        device=hardware.name,
        is_fake=True,
        batch=shapes,
        layers=names,
        state=state_bytes(
            model,
            inputs=input_bytes(expanded.trace),
            optimizer=optimizer,
            device_type=None,
            is_accelerator=not is_host,
        ),
    )


def trace_config(
    source: Any,
    *,
    tokens: int,
    hardware: Hardware,
    dtype: torch.dtype = torch.bfloat16,
    samples: int = 1,
    batch: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Profile:
    """`trace` of a model that does not exist yet.

    `source` is a config of transformers (a causal language model is built) or a function that builds the model; it is
    built on the meta device in `dtype`. The batch is `samples` rows of `tokens` tokens that are their own labels,
    unless `batch` says otherwise. `optimizer` makes one from the parameters. `options` go to `trace`.
    """
    model = _built(source, dtype)
    if batch is None:
        ids = torch.empty(samples, tokens, dtype=torch.int64, device="meta")
        batch = {"input_ids": ids, "labels": ids}
    made = None if optimizer is None else optimizer([p for p in model.parameters() if p.requires_grad])
    return trace(model, batch, hardware=hardware, loss=loss, optimizer=made, **options)


def _built(source: Any, dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            if callable(source):
                return source().train()
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_config(source, dtype=dtype).train()
    finally:
        torch.set_default_dtype(before)


class _Roofline:
    """A clock that computes, over operators that mostly do not run.

    Small tensors that hold values (positions, masks, counts: whatever came from no fake tensor) are worked out for
    real, so that a model may look at them, and takes the branch that it would take.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, None]:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors and all(_has_value(tensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs), None
        if func is torch.ops.aten._grouped_mm.default and tensors[0].dtype is not torch.bfloat16:
            return _grouped_product(func, args, kwargs), None
        out = func(*args, **kwargs)
        if not tensors and isinstance(out, torch.Tensor) and _is_control(out):
            with unset_fake_temporarily():
                return func(*args, **kwargs), None
        return out, None

    def seconds(self, mark: None, call: Call) -> float:
        return op_seconds(call, self._hardware)

    def settle(self, column: list[float]) -> list[float]:
        return column


def _is_control(tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _REAL_BYTES


def _has_value(tensor: torch.Tensor) -> bool:
    is_small = tensor.numel() * tensor.element_size() <= _REAL_BYTES
    return is_small and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def _grouped_product(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """Torch knows the shape of a grouped product in bfloat16 only; other dtypes have the same."""
    dtype = args[0].dtype
    args = tuple(
        arg.to(torch.bfloat16) if isinstance(arg, torch.Tensor) and arg.dtype is dtype else arg for arg in args
    )
    shape = func(*args, **kwargs)
    return torch.empty_strided(shape.size(), shape.stride(), dtype=dtype, device=shape.device)


@dataclass(frozen=True, slots=True)
class _Setting:
    """How to trace."""

    hardware: Hardware
    layers: tuple[str, ...]
    needs_scalar: bool
    is_fused: bool
    runs: tuple[Run, ...]
    accumulates: bool


def _trace(
    model: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] | None, setting: _Setting
) -> tuple[Expanded, str]:
    mode = _mode_of(model)
    clock = _Roofline(setting.hardware)
    observer = Observer(device=torch.device("cpu"), clock=clock, park=FakePark(), layers=setting.layers)
    observer.skipped = frozenset(name for run in setting.runs for name in run.skipped)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_quietly())
        stack.enter_context(_grouped_experts(model))
        stack.enter_context(_lent(model, mode))
        stack.enter_context(skipping(model, setting.runs))
        stack.enter_context(mode)
        if setting.is_fused:
            stack.enter_context(fused())
        fake_batch = _without_numbers(batch, mode)
        try:
            recorded = record_step(
                model,
                fake_batch,
                observer,
                loss,
                needs_scalar=setting.needs_scalar,
                accumulates=setting.accumulates,
            )
        except _LOOKS_AT_VALUES as error:
            raise _depends_on_data(observer, error) from error
        except ConfigError as error:
            if isinstance(error.__cause__, _LOOKS_AT_VALUES):
                raise _depends_on_data(observer, error.__cause__) from error
            raise
    nodes, recipes = with_recipes(recorded)
    return expand(recorded, nodes, recipes.alone, setting.runs), observer.batch


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Inside, torch does not log the traceback of an operator that fails: what is wrong is said once, in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _depends_on_data(observer: Observer, error: BaseException) -> ConfigError:
    where = observer.failed_at or str(error).partition("\n")[0]
    return ConfigError(
        f"trace: the model looks at the values of its tensors ({where}), and a trace has none; profile it with real "
        "ones: `lowtide profile RUN.yaml`, or lowtide.observe(model, batch)"
    )


# -- a model without its weights ---------------------------------------------------------------------------------------


def _mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode in which the model was built, or a new one."""
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            return parameter.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of the same shape on the host."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if not is_plain(tensor):
        raise ConfigError(
            f"trace: cannot trace a {type(tensor).__name__} of layout {tensor.layout}; trace the model before it is "
            "sharded or quantized, or profile it with real tensors"
        )
    with mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def _without_numbers(batch: Any, mode: FakeTensorMode) -> Any:
    """The batch in fake tensors, but for small ones of integers (tokens, masks, positions), which keep their values."""
    made: dict[int, torch.Tensor] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            is_fake = isinstance(tensor, FakeTensor) or tensor.is_meta or not is_plain(tensor)
            with unset_fake_temporarily():
                real = None if is_fake else tensor.to("cpu")
            made[id(tensor)] = _fake(tensor, mode) if real is None or not _is_control(real) else real
        return made[id(tensor)]

    return tree_map_only(torch.Tensor, convert, batch)


@contextlib.contextmanager
def _lent(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Inside, the model's parameters and buffers are fake; afterwards everything is what it was."""
    fakes: dict[int, torch.Tensor] = {}
    before = []
    for module in model.modules():
        attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        before.append((module, dict(module._parameters), dict(module._buffers), attributes))
    flat = [(module, module._flat_weights) for module in model.modules() if isinstance(module, nn.RNNBase)]
    try:
        for module, parameters, buffers, _ in before:
            for held, table in ((parameters, module._parameters), (buffers, module._buffers)):
                for name, tensor in held.items():
                    if tensor is not None:
                        if id(tensor) not in fakes:
                            fakes[id(tensor)] = _fake(tensor, mode)
                        table[name] = fakes[id(tensor)]  # type: ignore[assignment]
        for module, weights in flat:
            module._flat_weights = [fakes.get(id(weight), weight) for weight in weights]
        yield
    finally:
        for module, parameters, buffers, attributes in before:
            for held, table in ((parameters, module._parameters), (buffers, module._buffers)):
                table.clear()
                table.update(held)  # type: ignore[arg-type]
            _forget_fakes(module, attributes)
        for module, weights in flat:
            module._flat_weights = weights


def _forget_fakes(module: nn.Module, before: dict[str, Any]) -> None:
    """Some models put tensors away in attributes of their own: fake ones must not stay there."""
    for key, value in list(vars(module).items()):
        if key.startswith("_") or value is before.get(key):
            continue
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
            if key in before:
                module.__dict__[key] = before[key]
            else:
                del module.__dict__[key]


@contextlib.contextmanager
def _grouped_experts(model: nn.Module) -> Iterator[None]:
    """Inside, experts of transformers that would loop over those that were hit run as grouped products."""
    attribute = "_experts_implementation_internal"
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    eager = [config for config in configs.values() if getattr(config, attribute, None) == "eager"]
    for config in eager:
        setattr(config, attribute, "grouped_mm")
    try:
        yield
    finally:
        for config in eager:
            setattr(config, attribute, "eager")
