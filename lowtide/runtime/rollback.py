"""Running out of memory in the middle of a micro-batch: take it back, need less, run it again.

What: `Rollback.run(closure)` runs forward and backward of one micro-batch. On an out-of-memory error anywhere in it the
graph is let go, everything that the micro-batch changed is put back to the bit (module buffers, plain attributes of
modules, random states, lowtide's totals), the plan is tightened, and the closure runs again.
Why at this level: inside an allocator there is no safe place to think, and an operator cannot be repeated from outside.
A micro-batch can, because autograd owns everything that lowtide holds for it.

Gradients are not copied, and not moved aside while all goes well: with gradient accumulation that would double them. A
gradient that has received its share of this micro-batch before the error keeps it (it is complete, and the second run
would compute the same bits); in the second run that parameter lends autograd an empty gradient, which is thrown away.
So every `.grad` is what plain accumulation gives, because autograd's own accumulation made it. A gradient that did not
exist before the micro-batch is simply dropped.

Refused, with a note on the error that says why: several ranks (the others would wait in their collectives for ever),
parameters with post-accumulate-grad hooks (they have acted on a gradient already), a closure that wrote to parameters
or wrote into gradients by itself.

Cost while nothing fails: one walk over modules and parameters (about 12 us a parameter that has a gradient), a copy of
each buffer up to 1 MiB, a host copy of larger ones until they were seen not to change.
Not covered: what the closure itself advances (a data iterator: draw the batch outside), gradients of tensors that are
neither the model's nor the optimizer's, attributes of modules that are tensors or objects of other classes.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import random
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lowtide.catalog.trace import is_plain
from lowtide.planner.fate import Fate
from lowtide.planner.plan import Plan
from lowtide.planner.rules import Pattern, Rule, Rules
from lowtide.runtime.stats import Counters

MAX_ATTEMPTS = 3
_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # Older accelerator plug-ins raise a plain RuntimeError.
    "out of memory. Tried to allocate",
)
_DEVICE_COPY_BYTES = 2**20
_PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None), tuple, torch.dtype, torch.device, torch.Size})
_CONTAINER_TYPES = frozenset({dict, OrderedDict, list, set})
# Facts, not work: what was really copied, waited for or refused stays counted when a micro-batch is taken back.
_KEPT_COUNTERS = frozenset(
    {"copied_in_bytes", "copied_out_bytes", "stall_seconds", "num_kept_for_lack_of_room", "num_retries"}
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: a device's allocator, torch's allocator on the host, or Python's own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def tighter(plan: Plan, *, has_room: bool) -> tuple[Plan, str] | None:
    """A plan that needs less memory, and what it does, in words; None when rules have nothing smaller to say.

    First everything is swapped (`has_room`: the slower tiers did not refuse anything yet), then every layer recomputed.
    """
    rules = plan.rules.rules
    swap_all = Rule(pattern=Pattern.parse("*"), fate=Fate.SWAP, where="after running out of memory")
    recompute_all = dataclasses.replace(swap_all, fate=Fate.RECOMPUTE)
    if has_room and not _does_to_all(plan, Fate.SWAP):
        recomputed = () if plan.is_solved else tuple(rule for rule in rules if rule.fate is Fate.RECOMPUTE)
        return _by_rules(plan, (*recomputed, swap_all)), "everything is swapped now"
    if plan.layers and not _does_to_all(plan, Fate.RECOMPUTE):
        return _by_rules(plan, (recompute_all, swap_all)), "all layers are recomputed now"
    return None


def _does_to_all(plan: Plan, fate: Fate) -> bool:
    rules = plan.rules.rules
    return (
        not plan.is_solved
        and any(rule.fate is fate and rule.pattern.text == "*" for rule in rules)
        and not any(rule.fate is Fate.KEEP for rule in rules)
    )


def _by_rules(plan: Plan, rules: tuple[Rule, ...]) -> Plan:
    return dataclasses.replace(plan, rules=Rules(rules), is_solved=False, sites=(), predicted=None, account=())


class Rollback:
    """Runs micro-batches of one model, and runs them again after an out-of-memory error. See the module."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        counters: Callable[[], Counters | None],
        settle: Callable[[], None],
        tighten: Callable[[BaseException], str | None],
        describe_floor: Callable[[], str],
    ) -> None:
        """`counters` gives the totals in force (none before a plan is); `settle` waits for copies and frees what dead
        graphs owned; `tighten` makes the plan smaller and says how, or returns None; `describe_floor` says, for the
        last words, how much memory was needed at least."""
        self._model = model
        self._optimizer = optimizer
        self._counters = counters
        self._settle = settle
        self._tighten = tighten
        self._describe_floor = describe_floor
        self._steady = WeakTensorKeyDictionary()

    def run(self, closure: Callable[[], Any], *, is_local: bool) -> Any:
        """What `closure()` returns. Raises what it raises; an out-of-memory error only when nothing helped."""
        tried: list[str] = []
        with _Start(self._model, self._optimizer, self._counters(), self._steady) as start:
            while True:
                try:
                    result = closure()
                    break
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = error
                # Out of the except block: nothing refers to the failed graph any more but the frames of the error.
                obstacle = _no_second_run(is_local) or start.obstacle()
                if obstacle is not None:
                    failure.add_note(f"lowtide: this micro-batch was not run again: {obstacle}")
                    raise failure
                place = self._let_go(failure)
                start.go_back()
                how = self._tighten(failure) if len(tried) < MAX_ATTEMPTS - 1 else None
                if how is None:
                    failure.add_note(place)
                    failure.add_note(self._last_words(tried, start.num_unfinished()))
                    raise failure
                tried.append(how)
                counters = self._counters()
                if counters is not None:
                    counters.num_retries += 1
                warnings.warn(
                    f"lowtide: out of memory ({_first_line(failure)}); {how}, and the micro-batch is run again.",
                    stacklevel=3,
                )
                del failure
            start.check_repeated()
        return result

    def _let_go(self, failure: BaseException) -> str:
        """End the failed graph, and give its memory back to whoever asks next. Returns where memory ran out."""
        place = "".join(["Memory ran out here:\n", *traceback.format_tb(failure.__traceback__)]).rstrip()
        for error in _chain(failure):
            # The frames hold the graph. Clearing them is not enough: cells of nested functions would survive.
            error.__traceback__ = None
        gc.collect()  # graphs in reference cycles
        self._settle()
        for device_type in {parameter.device.type for parameter in self._model.parameters()} - {"cpu", "meta"}:
            torch.get_device_module(device_type).empty_cache()
        return place

    def _last_words(self, tried: list[str], num_unfinished: int) -> str:
        what = "; then ".join(tried) if tried else "the plan has nothing left to give"
        partial = (
            f" {num_unfinished} gradients hold a part of this micro-batch: set them to zero before you go on."
            if num_unfinished
            else ""
        )
        return (
            f"lowtide: memory ran out {len(tried) + 1} times in this micro-batch ({what}). {self._describe_floor()}"
            f"{partial} Use smaller micro-batches or a larger device."
        )


def _no_second_run(is_local: bool) -> str | None:
    if is_local or not (dist.is_available() and dist.is_initialized()):
        return None
    return (
        f"this process is one of {dist.get_world_size()} ranks, and a rank cannot repeat its collectives alone. End "
        "all ranks and lower the budget; a closure without collectives may say so: tide.step(closure, is_local=True)."
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and everything that it was raised from or during."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        yield one


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Gradient:
    """A parameter and the gradient that it had before the micro-batch."""

    __slots__ = ("_hook", "_is_kept_graph", "_old", "_strong", "_version", "num_held", "num_seen", "parameter",
                 "parameter_version")  # fmt: skip

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.parameter_version = parameter._version
        self.num_held = 0
        """How many accumulations of this micro-batch the old gradient holds."""
        self.num_seen = 0
        """How many there were in this attempt."""
        self._is_kept_graph = False
        grad = parameter.grad
        # Weakly: a closure that begins with zero_grad() must really free what it drops. Sparse gradients may be
        # replaced instead of written to, and then the old one is what must come back.
        self._old = None if grad is None else TensorWeakRef(grad)
        self._strong = grad if grad is not None and grad.layout is not torch.strided else None
        self._version = 0 if grad is None else grad._version
        self._hook = None if grad is None else parameter.register_post_accumulate_grad_hook(self._after)

    def _after(self, parameter: torch.Tensor) -> None:
        assert self._old is not None
        self.num_seen += 1
        self._is_kept_graph |= torch.is_grad_enabled()
        if self.num_seen < self.num_held:
            parameter.grad = None
        elif self.num_seen == self.num_held:
            parameter.grad = self._strong
        elif parameter.grad is self._old():
            self.num_held += 1

    def obstacle(self) -> str | None:
        """Why the gradient cannot be taken back, or None."""
        if self.parameter._version != self.parameter_version:
            return "the closure wrote to parameters (an optimizer step belongs outside of it)."
        if self._old is None:
            return None
        if self._is_kept_graph:
            return "gradients were accumulated with create_graph=True, which replaces them."
        old = self._old()
        num_written = self.num_held if old is None else old._version - self._version
        is_aside = self.num_seen < self.num_held
        if num_written != self.num_held or (self.num_held and not is_aside and self.parameter.grad is not old):
            return "the closure changed gradients by itself (do so outside of it)."
        return None

    def go_back(self) -> None:
        """Ready for another attempt. Where the closure itself let go of the old gradient, there is none."""
        assert self._old is not None or not self.num_held
        old = None if self._old is None else self._old()
        self.num_seen = 0
        if self.num_held:
            self._strong, old = old, None
        self.parameter.grad = old

    def close(self) -> None:
        """The micro-batch is over, well or badly: no gradient stays aside."""
        if self._hook is not None:
            self._hook.remove()
        if self.num_seen < self.num_held and self._strong is not None:
            self.parameter.grad = self._strong


class _Start:
    """What a micro-batch finds: gradients, buffers, attributes, random states, totals. A context manager."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        counters: Counters | None,
        steady: WeakTensorKeyDictionary,
    ) -> None:
        parameters = {id(parameter): parameter for parameter in model.parameters()}
        for group in optimizer.param_groups if optimizer is not None else ():
            parameters.update({id(parameter): parameter for parameter in group["params"]})
        modules = list(model.modules())
        self._counters = counters
        self._counted = {} if counters is None else dataclasses.asdict(counters)
        self._has_hooks = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters.values())
        with _disable_current_modes():
            self._random = _RandomStates({tensor.device for tensor in parameters.values()})
            self._buffers = _Buffers(modules, steady)
        self._attributes = _Attributes(modules)
        self._gradients = [_Gradient(p) for p in parameters.values() if p.requires_grad]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for gradient in self._gradients:
            gradient.close()
        if kind is None:
            self._buffers.note_steady()

    def obstacle(self) -> str | None:
        """Why the micro-batch cannot be taken back, or None."""
        if self._has_hooks:
            return "parameters have post-accumulate-grad hooks, which have acted on gradients of the failed run."
        found = (gradient.obstacle() for gradient in self._gradients)
        return next((text for text in found if text is not None), None) or self._buffers.obstacle()

    def go_back(self) -> None:
        """Put everything back."""
        for gradient in self._gradients:
            gradient.go_back()
        with _disable_current_modes():
            self._buffers.restore()
            self._random.restore()
        self._attributes.restore()
        for name, value in self._counted.items():
            if name not in _KEPT_COUNTERS:
                setattr(self._counters, name, value)

    def num_unfinished(self) -> int:
        """How many old gradients hold a part of the micro-batch."""
        return sum(gradient.num_held > 0 for gradient in self._gradients)

    def check_repeated(self) -> None:
        """After success: the last attempt must have done at least what the failed ones did."""
        if any(gradient.num_held > gradient.num_seen for gradient in self._gradients):
            raise RuntimeError(
                "lowtide: the closure given to tide.step ran out of memory, was run again, and then computed fewer "
                "gradients than before. Gradients are not right now: give tide.step a closure that does the same each "
                "time."
            )


class _RandomStates:
    """Generators of torch (host and devices), Python, and numpy if it is in use."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in devices
            if device.type not in ("cpu", "meta")
        }
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)


class _Buffers:
    """What is in the modules' buffers."""

    def __init__(self, modules: list[nn.Module], steady: WeakTensorKeyDictionary) -> None:
        self._steady = steady
        found = {id(b): b for module in modules for b in module._buffers.values() if b is not None and b.numel()}
        self._copies = [(buffer, buffer._version, self._copy(buffer)) for buffer in found.values()]

    def _copy(self, buffer: torch.Tensor) -> torch.Tensor | None:
        if _is_small(buffer):
            return buffer.detach().clone()
        return None if buffer in self._steady else buffer.detach().to("cpu", copy=True)

    def note_steady(self) -> None:
        """Large buffers that came through a micro-batch unchanged are trusted to their version from now on."""
        for buffer, version, _ in self._copies:
            if not _is_small(buffer) and buffer._version == version:
                self._steady[buffer] = True
            else:
                self._steady.pop(buffer, None)

    def obstacle(self) -> str | None:
        if any(copy is None and buffer._version != version for buffer, version, copy in self._copies):
            return "it wrote to a large buffer that it had not written to before, and there is no copy of it."
        return None

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, version, copy in self._copies:
                if copy is None or (buffer._version == version and not _is_small(buffer)):
                    continue
                # Written only where it differs: another live graph may have saved it.
                if not _same_bytes(buffer, copy):
                    buffer.copy_(copy)


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.numel() * buffer.element_size() <= _DEVICE_COPY_BYTES


def _same_bytes(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    if not is_plain(buffer) or buffer.device != copy.device:
        return False
    first, second = (
        t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (buffer, copy)
    )
    return torch.equal(first, second)


class _Attributes:
    """What the instances of modules hold beside tensors: numbers, texts, flags; lists, sets and dictionaries (hooks and
    buffers are such), one level deep; and which names there are."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before = [
            (vars(module), frozenset(vars(module)), *_plain_and_containers(vars(module))) for module in modules
        ]

    def restore(self) -> None:
        for now, names, plain, containers in self._before:
            # A wrapped forward is lowtide's own doing: the autopilot applies its plan inside a step.
            for name in [name for name in now if name not in names and name != "forward"]:
                del now[name]
            now.update(plain)
            for container, items in containers:
                container.clear()
                container.extend(items) if isinstance(container, list) else container.update(items)


def _plain_and_containers(attributes: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    plain, containers = {}, []
    for name, value in attributes.items():
        kind = type(value)
        if kind in _PLAIN_TYPES:
            plain[name] = value
        elif kind in _CONTAINER_TYPES:
            plain[name] = value
            containers.append((value, value.copy()))
    return plain, containers
