"""`trace`: the profile of a step that never runs. No weights, no device, any size of model.

What: the same observation as profiling/observe_step.py under fake tensors: shapes, strides and storages are real, bytes
are not there. Lifetimes and bytes are exact; times are a roofline's, for a device that need not be here. The model may
be real (its parameters are lent fake ones for the time of the trace), on the meta device, or described by a config.
Of layers that are equal only three are traced and the rest copied (fake_model.py, expand_layers.py): a model of 671 B
parameters takes seconds.

`fused_attention` gives attention as an accelerator would run it. On the host, torch falls back to plain products and a
softmax when the head dimensions of keys and values differ (multi-head latent attention: 192 and 128) or when attention
drops out. An accelerator has fused kernels for both, which save queries, keys, values, output and one number a row; a
trace of the fallback would overstate them by gigabytes. So such calls of `scaled_dot_product_attention` go to an
operator of our own that has shapes and no kernel. Attention that the model writes out itself (`eager`) stays: that is
what an accelerator would run, too.

Cost: about 0.3 ms an operator that is traced. Not covered: control flow that depends on data (an error that says
where), sharded parameters, and fake accelerator tensors: a build of torch without that device aborts the process on
them, so everything is traced as if on the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide.core.profile import Profile, StateBytes
from lowtide.core.recipe import Codec
from lowtide.errors import ConfigError
from lowtide.loss.blocks import REPEAT
from lowtide.profiling.build_profile import byte_spans, find_recipes, profile_of
from lowtide.profiling.fake.expand_layers import expand
from lowtide.profiling.fake.fake_model import (
    CannotSkipError,
    Run,
    fake_of,
    fakes_alive,
    fakes_left,
    find_runs,
    grouped_experts,
    has_value,
    is_control,
    is_fake,
    lend,
    mode_of,
    skipping,
    without_numbers,
)
from lowtide.profiling.fake.roofline import op_seconds, workspace_bytes
from lowtide.profiling.layers import find_layers
from lowtide.profiling.observe_step import input_bytes, record_step, wants_accumulation
from lowtide.profiling.saved_tensors import fake_stash
from lowtide.profiling.smaller import traced_codec
from lowtide.profiling.state_bytes import state_bytes
from lowtide.profiling.step_recorder import StepRecorder
from lowtide.profiling.untouched import apart, cut_graphs, untouched
from lowtide.recipes.graph import OpCall
from lowtide.tensors.private import (
    FAKE_TENSOR_MODULE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    grouped_mm,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)
from lowtide.timeline.hardware import Hardware

_ATTENTION, _ATTENTION_BACKWARD = "lowtide::planning_attention", "lowtide::planning_attention_backward"


class _FusedAttention(TorchFunctionMode):
    """Inside, attention that the host would not fuse is fused, in shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._operator = _operator()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(  # noqa: PLR0917 (the signature is torch's)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if query.dim() != 4 or (query.shape[-1] == value.shape[-1] and dropout_p == 0.0):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        return self._operator(query, key, value, attn_mask, dropout_p, is_causal)[0]


@functools.lru_cache(maxsize=1)
def _operator() -> Any:
    """Registered on first use: who never plans never sees it."""

    inputs = "Tensor query, Tensor key, Tensor value"
    setting = "Tensor? attn_mask, float dropout_p, bool is_causal"
    torch.library.define(
        _ATTENTION,
        f"({inputs}, {setting}) -> (Tensor output, Tensor logsumexp)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    torch.library.define(
        _ATTENTION_BACKWARD,
        f"(Tensor grad, {inputs}, Tensor output, Tensor logsumexp, {setting}) -> (Tensor, Tensor, Tensor)",
    )

    @torch.library.register_fake(_ATTENTION)
    def _(query: Tensor, key: Tensor, value: Tensor, *setting: Any) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, _ = query.shape
        # Kernels write one row of all heads after the other: what follows needs no copy.
        output = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        return output, query.new_empty((batch, heads, tokens), dtype=torch.float32)

    @torch.library.register_fake(_ATTENTION_BACKWARD)
    def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        query, key, value, mask, ctx.dropout_p, ctx.is_causal = inputs
        ctx.save_for_backward(query, key, value, *output, mask)

    def backward(ctx: Any, grad: Tensor, grad_logsumexp: Tensor | None) -> tuple:
        query, key, value, output, logsumexp, mask = ctx.saved_tensors
        operator = torch.ops.lowtide.planning_attention_backward
        grads = operator(grad, query, key, value, output, logsumexp, mask, ctx.dropout_p, ctx.is_causal)
        return (*grads, None, None, None)

    torch.library.register_autograd(_ATTENTION, backward, setup_context=setup)
    return torch.ops.lowtide.planning_attention


Price = Callable[[Sequence[OpCall], Sequence[str], Hardware], list[float]]
"""Seconds of each of these operators, in a model with these layers, on a device."""

_LOOKS_AT_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


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
    price: Price | None = None,
    state: StateBytes | None = None,
) -> Profile:
    """The profile of one forward and backward of `model` on `batch`, timed by the roofline of `hardware`.

    `batch`, `loss` and `needs_scalar` are those of `observe`; only shapes and dtypes matter. `fused_attention` says
    whether the device fuses attention that the host would not; None: every device but the host does. `price` gives the
    times of operators in the place of the roofline of each. `state`: of the same model and optimizer, if it is known.

    Raises ConfigError for what `observe` raises it for, and for a model whose control flow depends on data.
    """
    names = find_layers(model) if layers is None else layers
    is_host = hardware.name.startswith("cpu")
    is_fused = not is_host if fused_attention is None else fused_attention
    is_callable = callable(batch) and not isinstance(batch, dict | tuple)
    runs = find_runs(model, names) if skips_equal_layers and not is_callable else ()
    accumulates = False
    mode = mode_of(model)
    # Of a model that was built so; else there are none.
    own = {id(each) for each in fakes_alive(mode)} if any(map(is_fake, model.parameters())) else set()
    while True:
        try:
            profile = apart(
                _trace,
                model=model,
                batch=batch,
                loss=loss,
                clock=_Roofline(hardware, names, price),
                mode=mode,
                layers=names,
                needs_scalar=needs_scalar,
                is_fused=is_fused,
                runs=runs,
                accumulates=accumulates,
            )
            break
        except CannotSkipError:
            runs = ()
        except RuntimeError as error:
            if accumulates or not wants_accumulation(error):
                raise
            accumulates = True
    inputs = profile.state.inputs
    if state is None:
        how: Any = {"optimizer": optimizer, "device_type": None, "is_accelerator": not is_host}
        state = state_bytes(model, inputs=inputs, **how)
    profile = dataclasses.replace(profile, state=dataclasses.replace(state, inputs=inputs))
    if left := fakes_left(mode, own):
        warnings.warn(
            f"lowtide: the traced step left tensors without bytes in {left}, which lowtide cannot put back; empty it "
            "before you train.",
            stacklevel=3,
        )
    return profile


class _Roofline:
    """A clock that computes, over operators that mostly do not run.

    Small tensors that hold values (positions, masks, counts: whatever came from no fake tensor) are worked out for
    real, so that a model may look at them, and takes the branch that it would take.
    """

    def __init__(self, hardware: Hardware, layers: tuple[str, ...], price: Price | None) -> None:
        self.hardware = hardware
        self._layers = layers
        self._price = price
        self.workspaces: list[tuple[int, int]] = []
        """(operator, bytes) of the kernels that take memory for themselves, once the step is over."""

    def run(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, None]:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors and all(has_value(tensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs), None
        if func is grouped_mm and tensors[0].dtype is not torch.bfloat16:
            return _grouped_product(func, args, kwargs), None
        out = func(*args, **kwargs)
        if not tensors and isinstance(out, torch.Tensor) and is_control(out):
            with unset_fake_temporarily():
                return func(*args, **kwargs), None
        return out, None

    def seconds(self, mark: None, call: OpCall) -> OpCall:
        return call

    def settle(self, column: list[OpCall]) -> list[float]:
        if not self.hardware.name.startswith("cpu"):
            found = ((number, workspace_bytes(call)) for number, call in enumerate(column))
            self.workspaces = [(number, nbytes) for number, nbytes in found if nbytes]
        if self._price is not None:
            seconds = self._price(column, self._layers, self.hardware)
        else:
            seconds = [op_seconds(call, self.hardware) for call in column]
        times = [1.0]  # blocks within blocks
        for number, call in enumerate(column):
            if call.func.overloadpacket.__name__ == REPEAT:
                times = [*times, times[-1] * call.args[1]] if call.args[1] else times[:-1]
            seconds[number] *= times[-1]
        return seconds


def _grouped_product(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """Torch knows the shape of a grouped product in bfloat16 only; other dtypes have the same."""
    dtype = args[0].dtype
    args = tuple(
        arg.to(torch.bfloat16) if isinstance(arg, torch.Tensor) and arg.dtype is dtype else arg for arg in args
    )
    shape = func(*args, **kwargs)
    return torch.empty_strided(shape.size(), shape.stride(), dtype=dtype, device=shape.device)


def _trace(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    clock: _Roofline,
    *,
    mode: FakeTensorMode,
    layers: tuple[str, ...],
    needs_scalar: bool,
    is_fused: bool,
    runs: tuple[Run, ...],
    accumulates: bool,
) -> Profile:
    """The profile, whose state has no more than the batch."""

    def codec_of(storage: torch.UntypedStorage, dtype: torch.dtype, limit: int | None) -> Codec | None:
        return traced_codec(storage.nbytes(), dtype, clock.hardware, limit)

    recorder = StepRecorder(
        device=torch.device("cpu"), clock=clock, stash=fake_stash(), layers=layers, codec_of=codec_of
    )
    recorder.watch.skipped = frozenset(name for run in runs for name in run[2:-1])
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(untouched(model, (batch, loss), torch.device("cpu")))
        cut, ends = cut_graphs(before, lambda tensor: fake_of(tensor.detach(), mode))
        batch = tree_map_only(torch.Tensor, cut, batch)
        stack.enter_context(quietly())
        stack.enter_context(grouped_experts(model))
        lend(model, mode)
        stack.enter_context(skipping(model, runs))
        stack.enter_context(mode)
        if is_fused:
            stack.enter_context(_FusedAttention())
        fake_batch = without_numbers(batch, mode)
        try:
            recorded = record_step(
                model,
                fake_batch,
                recorder,
                loss,
                needs_scalar=needs_scalar,
                accumulates=accumulates,
                ends=ends,
            )
        except _LOOKS_AT_VALUES as error:
            raise _depends_on_data(recorder, error) from error
        except ConfigError as error:
            if isinstance(error.__cause__, _LOOKS_AT_VALUES):
                raise _depends_on_data(recorder, error.__cause__) from error
            raise
    recorded.ops.temporary += clock.workspaces
    find_recipes(recorded)
    how: Any = {"device": clock.hardware.name, "is_fake": True, "batch": recorder.watch.batch, "layers": layers}
    profile = profile_of(recorded, model, **how, state=StateBytes(inputs=input_bytes(recorded)))
    return expand(profile, *byte_spans(recorded), runs) if runs else profile


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside, torch does not log the traceback of an operator that fails: what is wrong is said once, in one line."""
    logger = logging.getLogger(FAKE_TENSOR_MODULE)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _depends_on_data(recorder: StepRecorder, error: BaseException) -> ConfigError:
    where = recorder.failed_at or str(error).partition("\n")[0]
    return ConfigError(
        f"trace: the model looks at the values of its tensors ({where}), and a trace has none; profile it with real "
        "ones: `lowtide profile RUN.yaml`, or lowtide.observe(model, batch)"
    )
