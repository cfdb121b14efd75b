"""The sliced loss in a model of transformers, and head and loss in declared blocks, for `memory.loss`.

What: such models call `self.loss_function(logits, labels, vocab_size=..., ...)`, a property that anybody may set.
`attach` sets it to a `SlicedLoss`, which gives the same loss and gradients to the bit (cross_entropy.py) and asks the
model's own function where it cannot (logits that are sharded or in fp64, labels that are no numbers of words, a machine
on which the self-test fails), and where the loss is so small that slices would take more memory than they save.
`close()` puts back what was there.

Which losses: transformers' own of causal and of masked language models. They upcast the logits, shift the labels
(causal), and call `cross_entropy`. A self-test with the very function that is replaced also finds a version of
transformers in which it means something else.
With `rows`, a batch of more rows than one block has head and loss in blocks (head.py). The head is called all the same,
with no rows, and gives logits of no rows, which the model scales as it does; from their graph is read what is done to
logits before the loss. So the output's `logits` are empty then. Smaller batches, and steps without labels or without
gradients, go as without `rows`: one block has plain's bits.
Refused by name: models whose forward computes the loss without `loss_function` (bart, t5, whisper, ...). Not covered:
losses written by a user.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import ConfigError
from lowtide.loss.cross_entropy import ROWS_STEP, is_ordinary, keeps_bits, saves_memory, sliced_cross_entropy
from lowtide.loss.head import FORWARD, TANH, Step, head_cross_entropy, why_not_in_blocks
from lowtide.loss.layers import layer_rows_of, take_layers_in_blocks
from lowtide.tensors.private import (
    FakeTensor,
    are_transforms_active,
    forget_loss_function,
    has_loss_function,
    is_forward_mode,
    number_in_graph,
)
from lowtide.tensors.wrappers import is_distributed

_HOME = "transformers.loss.loss_utils"
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""The losses that are known, and whether labels are shifted: word n is predicted from the words before it."""


class SlicedLoss:
    """What stands in for the `loss_function` of one model. Called as that is; gives what that gives."""

    def __init__(self, plain: Callable[..., torch.Tensor], *, shifts: bool, blocks: HeadInBlocks | None = None) -> None:
        self._plain = plain
        self._shifts = shifts
        self.blocks = blocks
        self._keeps_bits = functools.cache(self._ask)
        self.was_sliced = False
        """Of the last call."""
        self.was_called = False

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **more: Any) -> torch.Tensor:
        """logits: `[..., vocab_size]`. labels: `[...]`, int64. `more`: num_items_in_batch, ignore_index, and for a
        causal model shift_labels; what else there is has no meaning in the plain function either."""
        if torch.compiler.is_compiling():  # a compiler that fuses the whole loss has slices of its own
            return self._plain(logits=logits, labels=labels, vocab_size=vocab_size, **more)
        self.was_called = True
        if self.blocks is not None and self.blocks.is_waiting:
            self.was_sliced = True
            loss_of, rows = self.blocks.loss_of(logits)
            return self._loss_of(loss_of, rows, labels, **more)
        shifted = more.get("shift_labels") if self._shifts else None
        read = labels if shifted is None else shifted
        is_worth = saves_memory(logits.numel() // vocab_size, vocab_size, torch.float32)
        self.was_sliced = is_worth and self._covers(logits, read, vocab_size)
        if not self.was_sliced:
            return self._plain(logits=logits, labels=labels, vocab_size=vocab_size, **more)
        return self._sliced(logits, labels, vocab_size, **more)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or a file of it, has the plain function: nobody would ever take a copied one off."""
        return copy.copy, (self._plain,)

    def _sliced(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        slice_rows: int | None = None,
        **more: Any,
    ) -> torch.Tensor:
        # A part of the logits need not be contiguous; the plain loss gets a copy from its upcast.
        rows = logits.reshape(-1, vocab_size)
        return self._loss_of(functools.partial(sliced_cross_entropy, rows, slice_rows=slice_rows), rows, labels, **more)

    def _loss_of(
        self,
        loss_of: Callable[..., torch.Tensor],
        rows: torch.Tensor,
        labels: torch.Tensor,
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if self._shifts:
            labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        target = labels.reshape(-1).to(rows.device)
        loss = loss_of(target, ignore_index=ignore_index, reduction=reduction, upcast=True)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    def _covers(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> bool:
        if isinstance(logits, FakeTensor):
            return True
        is_known = labels.dtype == torch.int64 and logits.is_floating_point() and logits.dtype is not torch.float64
        return is_known and is_ordinary(logits, labels) and self._keeps_bits(logits.device, logits.dtype, vocab_size)

    def _ask(self, device: torch.device, dtype: torch.dtype, num_words: int) -> bool:
        def sliced(logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
            return self._sliced(logits, labels, num_words, slice_rows=ROWS_STEP, **more)

        def plain(logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
            return self._plain(logits=logits, labels=labels, vocab_size=num_words, **more)

        hows: list[dict[str, Any]] = [{}, {"num_items_in_batch": 7}]
        return keeps_bits("memory.loss: the loss", sliced, plain, hows, device, dtype, num_words)


class HeadInBlocks:
    """Keeps the head of a model from making more logits than one block, and what it would have read for the loss."""

    _signature: inspect.Signature | None = None
    """Of the model's `forward`; None: this does nothing."""

    def __init__(self, owner: Any, rows: int) -> None:
        self.rows = rows
        self._head = owner.get_output_embeddings()
        self._signature = inspect.signature(owner.forward)
        self._forward = _Forward()
        self._hooks = [
            owner.register_forward_pre_hook(self._open, with_kwargs=True),
            owner.register_forward_hook(self._close, always_call=True),
            self._head.register_forward_pre_hook(self._cut),
            self._head.register_forward_hook(self._see, prepend=True),  # what others do to its output comes after it
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or a file of it, has the plain loss, and hooks that do nothing."""
        return object.__new__, (HeadInBlocks,)

    @property
    def is_waiting(self) -> bool:
        """Whether the head's input of this forward pass waits for the loss."""
        return self._forward.node is not None

    def loss_of(self, logits: torch.Tensor) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        """The loss of the head's input, by target, and that input by rows. `logits` are those of no rows that the loss
        was called with."""
        hidden, node = self._forward.hidden, self._forward.node
        assert hidden is not None
        steps, rows = _steps_between(node, logits), hidden.reshape(-1, hidden.shape[-1])
        self._forward.hidden = self._forward.node = None

        def loss_of(target: torch.Tensor, **how: Any) -> torch.Tensor:
            if len(target) != len(rows):
                raise ConfigError(
                    f"memory.loss: rows: the head was given {len(rows)} rows and the loss {len(target)} labels, so it "
                    "is not the loss of all that the head gives; write loss: sliced"
                )
            return head_cross_entropy(rows, self._head, target, rows=self.rows, steps=steps, **how)

        return loss_of, rows

    def _open(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._signature is None or getattr(owner.loss_function, "blocks", None) is not self:
            return
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        has_labels = any(given.get(name) is not None for name in ("labels", "shift_labels"))
        self._forward.is_open = has_labels and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def _close(self, owner: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._signature is None:
            return
        is_left = self.is_waiting
        self._forward.is_open, self._forward.hidden, self._forward.node = False, None, None
        if is_left and output is not None:
            raise ConfigError(
                f"memory.loss: rows: {type(owner).__name__} was given labels and has not called its loss_function with "
                "them; write loss: sliced"
            )

    def _cut(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._signature is None or not self._forward.is_open:
            return None
        (hidden,) = args
        needs_gradient = hidden.requires_grad or any(each.requires_grad for each in head.parameters())
        if not needs_gradient or hidden.numel() // hidden.shape[-1] <= self.rows:
            return None
        if are_transforms_active() or is_forward_mode() or is_distributed(hidden):
            raise ConfigError(
                "memory.loss: rows: torch.func, forward-mode derivatives and hidden states that are spread over ranks "
                "are not covered; write loss: sliced"
            )
        self._forward.hidden, self._forward.without_rows = hidden, hidden[..., :0, :]
        return (self._forward.without_rows,)

    def _see(self, head: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self._signature is None or self._forward.hidden is None:
            return
        if args[0] is not self._forward.without_rows:
            raise ConfigError(
                "memory.loss: rows: a hook of the head changes what it is given, and was put on after lowtide's, or is "
                "one of backward; put it on before lowtide.apply, or write loss: sliced"
            )
        self._forward.node = output.grad_fn


class _Forward(threading.local):
    """One forward pass of a model, in the thread that runs it."""

    is_open = False
    """Whether it has labels, and there is to be a gradient."""
    hidden: torch.Tensor | None = None
    """What the head was given, where it is more than one block, until the loss."""
    without_rows: torch.Tensor | None = None
    """What it was given instead."""
    node: Any = None
    """Of what the head gave for no rows, in autograd's graph. That may be written to after it."""


def _steps_between(head: Any, logits: torch.Tensor) -> tuple[Step, ...]:
    """What a model does between the node of its head and its loss, which must work on each number by itself."""
    steps: list[Step] = []
    node = logits.grad_fn
    while node is not head:
        before = [] if node is None else [each for each, _ in node.next_functions if each is not None]
        name = "nothing that autograd sees" if node is None else node.name()
        is_upcast = name == "ToCopyBackward0" and not steps and logits.dtype is torch.float32
        number = number_in_graph(node)
        is_known = name in FORWARD and (name == TANH or (number is not None and number.numel() == 1))
        if len(before) != 1 or not (is_upcast or is_known):
            raise ConfigError(
                f"memory.loss: rows: between its head and its loss this model does {name.removesuffix('Backward0')}, "
                "which is not known to work on each number by itself; write loss: sliced"
            )
        if not is_upcast:
            steps.append((name, number))
        node = before[0]
    return tuple(reversed(steps))


class AttachedLoss(contextlib.ExitStack):
    """What stands in a model for `memory.loss` and `memory.rows`; `close()` puts the model's own back. Idempotent."""

    loss: SlicedLoss | None = None
    """In the place of the model's `loss_function`; None: that stands there itself."""


def loss_of(model: nn.Module) -> str:
    """'sliced' where the last forward pass took its loss in slices or would have taken a longer batch's in blocks, else
    'plain'."""
    loss = _sliced_loss_of(model)
    return "sliced" if loss is not None and (loss.was_sliced or loss.blocks is not None) else "plain"


def _sliced_loss_of(model: nn.Module) -> SlicedLoss | None:
    owner = _owner_of(model)
    loss = None if owner is None else owner.loss_function
    return loss if isinstance(loss, SlicedLoss) else None


def loss_rows_of(model: nn.Module) -> int | None:
    """The rows of a block of head and loss, where they are in force."""
    loss = _sliced_loss_of(model)
    return None if loss is None or loss.blocks is None else loss.blocks.rows


def attach_where(
    model: nn.Module,
    *,
    may: bool,
    must: bool,
    rows: int | None = None,
    layer_rows: int | None = None,
    row_wise: tuple[str, ...] = (),
) -> AttachedLoss:
    """The loss in slices, or with `rows` in blocks, if it may be and can be; `must`: raises `ConfigError` where it
    cannot be. `layer_rows`: layers in blocks, or what `row_wise` names. What is in force already stays as it is."""
    with AttachedLoss() as attached:
        if layer_rows is not None and layer_rows_of(model)[0] is None:
            attached.callback(take_layers_in_blocks(model, layer_rows, row_wise))
        loss = None
        if may and _sliced_loss_of(model) is None and (must or not why_not(model)):
            loss = attached.enter_context(attach(model, rows)).loss
        kept = attached.pop_all()
    kept.loss = loss
    return kept


def why_not(model: nn.Module) -> str:
    """Why the loss of this model stays plain; empty where it can be sliced."""
    owner = _owner_of(model)
    if owner is None:
        return (
            "it has no loss_function of transformers, which is where a loss can be exchanged; in a training loop of "
            "your own call lowtide.cross_entropy"
        )
    own = (inspect.unwrap(each) for kind in type(owner).__mro__ for each in vars(kind).values() if callable(each))
    if not any("loss_function" in each.__code__.co_names for each in own if inspect.isfunction(each)):
        return f"the forward of {type(owner).__name__} has a loss of its own"
    plain = owner.loss_function
    if getattr(plain, "__module__", "") != _HOME or getattr(plain, "__name__", "") not in _SHIFTS:
        name = getattr(plain, "__qualname__", type(plain).__name__)
        return f"its loss_function is {name}, of which lowtide does not know that it works row by row"
    return ""


def attach(model: nn.Module, rows: int | None = None) -> AttachedLoss:
    """Slice the loss of `model`; with `rows`, head and loss in blocks of so many. Raises `ConfigError` where `why_not`
    has a reason, and for a head that `why_not_in_blocks` refuses."""
    if reason := why_not(model):
        raise ConfigError(f"memory.loss: this model's loss cannot be sliced: {reason}; write loss: plain")
    owner = _owner_of(model)
    if rows is not None and (reason := why_not_in_blocks(owner.get_output_embeddings())):
        raise ConfigError(
            f"memory.loss: rows: this model's head cannot be taken in blocks: {reason}; write loss: sliced"
        )
    plain, had_own = owner.loss_function, has_loss_function(owner)
    blocks = None if rows is None else HeadInBlocks(owner, rows)
    loss = SlicedLoss(plain, shifts=_SHIFTS[plain.__name__], blocks=blocks)

    def put_back() -> None:
        if blocks is not None:
            blocks.remove()
        if owner.loss_function is not loss:
            return  # somebody has set another since
        if had_own:
            owner.loss_function = plain
        else:
            forget_loss_function(owner)

    attached = AttachedLoss()
    attached.callback(put_back)
    attached.loss = owner.loss_function = loss
    return attached


def _owner_of(model: nn.Module) -> Any:
    """The outermost module that has a `loss_function`: the model itself, or what DDP, PEFT or the like stand around."""
    have_one = (module for module in model.modules() if isinstance(getattr(type(module), "loss_function", 0), property))
    return next(have_one, None)
