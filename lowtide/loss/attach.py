"""The sliced loss in a model of transformers, for `memory.loss`.

What: such models call `self.loss_function(logits, labels, vocab_size=..., ...)`, a property that anybody may set.
`attach` sets it to a `SlicedLoss`, which gives the same loss and gradients to the bit (cross_entropy.py) and asks the
model's own function where it cannot (logits that are sharded or in fp64, labels that are no numbers of words, a machine
on which the self-test fails), and where the loss is so small that slices would take more memory than they save.
`remove()` puts back what was there.

Which losses: transformers' own of causal and of masked language models. They upcast the logits, shift the labels
(causal), and call `cross_entropy`. A self-test with the very function that is replaced also finds a version of
transformers in which it means something else.
Logits that are a DTensor with its words spread over ranks are taken in slices where the model's own loss would leave
them there, under torch's `loss_parallel` (parallel.py); elsewhere the model's own function gathers them, and does so
here too.
Not covered: models that compute their loss without `loss_function` (bart, t5, whisper, ...); losses written by a user.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import ConfigError
from lowtide.loss.cross_entropy import ROWS_STEP, name_of, saves_memory, sliced_cross_entropy
from lowtide.loss.parallel import are_words_spread, dtensor_cross_entropy
from lowtide.loss.self_test import same_bits
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import (
    FakeTensor,
    are_transforms_active,
    forget_loss_function,
    has_loss_function,
    is_forward_mode,
    is_loss_parallel,
)
from lowtide.tensors.wrappers import inside, is_distributed

_HOME = "transformers.loss.loss_utils"
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""The losses that are known, and whether labels are shifted: word n is predicted from the words before it."""

Key = tuple[torch.device, torch.dtype, int]


class SlicedLoss:
    """What stands in for the `loss_function` of one model. Called as that is; gives what that gives."""

    def __init__(self, plain: Callable[..., torch.Tensor], *, shifts: bool) -> None:
        self._plain = plain
        self._shifts = shifts
        self._keeps_bits: dict[Key, bool] = {}
        self.was_sliced = False
        """Of the last call."""
        self.was_called = False

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **more: Any) -> torch.Tensor:
        """logits: `[..., vocab_size]`. labels: `[...]`, int64. `more`: num_items_in_batch, ignore_index, and for a
        causal model shift_labels; what else there is has no meaning in the plain function either."""
        if torch.compiler.is_compiling():  # a compiler that fuses the whole loss has slices of its own
            return self._plain(logits=logits, labels=labels, vocab_size=vocab_size, **more)
        self.was_called = True
        shifted = more.get("shift_labels") if self._shifts else None
        read = labels if shifted is None else shifted
        self.was_sliced = self._is_worth(logits, vocab_size) and self._covers(logits, read, vocab_size)
        if not self.was_sliced:
            return self._plain(logits=logits, labels=labels, vocab_size=vocab_size, **more)
        return self._sliced(logits, labels, vocab_size, **more)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or a file of it, has the plain function: nobody would ever take a copied one off."""
        return _itself, (self._plain,)

    def _sliced(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        slice_rows: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if self._shifts and shift_labels is None:
            labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        elif self._shifts:
            assert shift_labels is not None
            labels = shift_labels
        loss_of_rows = dtensor_cross_entropy if is_distributed(logits) else sliced_cross_entropy
        loss = loss_of_rows(
            # A part of the logits need not be contiguous; the plain loss gets a copy from its upcast.
            logits.reshape(-1, vocab_size),
            labels.reshape(-1).to(logits.device),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            upcast=True,
            slice_rows=slice_rows,
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    def _is_worth(self, logits: torch.Tensor, vocab_size: int) -> bool:
        return saves_memory(logits.numel() // vocab_size, inside(logits).shape[-1], torch.float32)

    def _covers(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> bool:
        if isinstance(logits, FakeTensor):
            # A trace without a device. Whether that device keeps the bits is asked when there is one.
            return True
        if not is_plain(labels) or labels.dtype != torch.int64:
            return False
        if is_distributed(logits):
            return is_loss_parallel() and are_words_spread(logits) and inside(logits).dtype.itemsize <= 4
        if not is_plain(logits):
            return False
        if are_transforms_active() or is_forward_mode():
            return False
        if not logits.is_floating_point() or logits.dtype is torch.float64:
            return False
        key = (logits.device, logits.dtype, vocab_size)
        if key not in self._keeps_bits:
            self._keeps_bits[key] = self._ask(*key)
        return self._keeps_bits[key]

    def _ask(self, device: torch.device, dtype: torch.dtype, num_words: int) -> bool:
        for items in (None, 7):
            more = {} if items is None else {"num_items_in_batch": items}

            def sliced(logits: torch.Tensor, labels: torch.Tensor, more: Any = more) -> torch.Tensor:
                return self._sliced(logits, labels, num_words, slice_rows=ROWS_STEP, **more)

            def plain(logits: torch.Tensor, labels: torch.Tensor, more: Any = more) -> torch.Tensor:
                return self._plain(logits=logits, labels=labels, vocab_size=num_words, **more)

            if not same_bits(sliced, plain, device, dtype, num_words):
                warnings.warn(
                    f"lowtide: memory.loss: the loss stays plain: in slices it has other bits here (torch "
                    f"{torch.__version__}, {device}, {name_of(dtype)}, {num_words} words)",
                    stacklevel=2,
                )
                return False
        return True


def _itself(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return plain


class LossHandle:
    """The sliced loss in force, until `remove()`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._had_own = has_loss_function(owner)
        self._plain = owner.loss_function
        self.loss = SlicedLoss(self._plain, shifts=_SHIFTS[self._plain.__name__])
        owner.loss_function = self.loss

    def remove(self) -> None:
        """Put the model's own function back, unless somebody has set another since. Idempotent."""
        if self._owner.loss_function is not self.loss:
            return
        if self._had_own:
            self._owner.loss_function = self._plain
        else:
            forget_loss_function(self._owner)


def loss_of(model: nn.Module) -> str:
    """'sliced' where the last forward pass took its loss in slices, else 'plain'."""
    loss = _sliced_loss_of(model)
    return "sliced" if loss is not None and loss.was_sliced else "plain"


def _sliced_loss_of(model: nn.Module) -> SlicedLoss | None:
    owner = _owner_of(model)
    loss = None if owner is None else owner.loss_function
    return loss if isinstance(loss, SlicedLoss) else None


@contextlib.contextmanager
def sliced_where(model: nn.Module, *, may: bool, must: bool) -> Iterator[None]:
    """Inside, the loss is sliced if it may be and can be. `must`: raises `ConfigError` where it cannot be."""
    handle = attach_where(model, may=may, must=must)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def attach_where(model: nn.Module, *, may: bool, must: bool) -> LossHandle | None:
    """`attach` if the loss may be sliced and can be; None else, and where it is sliced already."""
    if not may or _sliced_loss_of(model) is not None or (not must and why_not(model)):
        return None
    return attach(model)


def why_not(model: nn.Module) -> str:
    """Why the loss of this model stays plain; empty where it can be sliced."""
    owner = _owner_of(model)
    if owner is None:
        return (
            "it has no loss_function of transformers, which is where a loss can be exchanged; in a training loop of "
            "your own call lowtide.cross_entropy"
        )
    plain = owner.loss_function
    if getattr(plain, "__module__", "") != _HOME or getattr(plain, "__name__", "") not in _SHIFTS:
        name = getattr(plain, "__qualname__", type(plain).__name__)
        return f"its loss_function is {name}, of which lowtide does not know that it works row by row"
    return ""


def attach(model: nn.Module) -> LossHandle:
    """Slice the loss of `model` until `remove()` of the handle. Raises `ConfigError` where `why_not` has a reason."""
    reason = why_not(model)
    if reason:
        raise ConfigError(f"memory.loss: this model's loss cannot be sliced: {reason}; write loss: plain")
    return LossHandle(_owner_of(model))


def _owner_of(model: nn.Module) -> Any:
    """The outermost module that has a `loss_function`: the model itself, or what DDP, PEFT or the like stand around."""
    have_one = (module for module in model.modules() if isinstance(getattr(type(module), "loss_function", 0), property))
    return next(have_one, None)
