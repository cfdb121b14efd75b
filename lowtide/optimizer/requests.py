"""What `swap_optimizer` was asked for, and whether it can be: words for each mistake, before anything is touched.

What: checks of the arguments and of the optimizer, and what follows from them: the device, the engine, the tiers, the
parameters whose state stays. Why apart: each refusal is one sentence that says where, what, and the way out.

Whether a class of optimizers may be stepped in parts: torch's own are known (each has its tests). Any other class is
tried: two small twins of the optimizer take three steps with the same gradients, one all at once, the other one
parameter at a time in reverse, and must come out with the same bits in parameters, state, groups and attributes. For an
optimizer may look at all parameters in one step (a norm over the whole model, a second evaluation, a counter in
`self`), and stepped in parts it would go on without a word, to other numbers. The twins have parameters of their own,
another learning rate in each group, and copies of what the optimizer keeps in plain values and containers. What else it
holds (a module, objects of its own, a generator) they share with it; before each twin begins, and at the end, a
snapshot puts that back, with all random states and whatever a step writes to.

Cost: a look at each group; some milliseconds for unknown classes. Not covered: what an optimizer does from its fourth
step on, or for large parameters only; what nobody can put back (an iterator): a warning names it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lowtide.core.plan import Plan
from lowtide.engines.base import Engine, EngineChoice
from lowtide.engines.choose import choose_engine
from lowtide.engines.tiers.disk import default_directory
from lowtide.errors import ConfigError, did_you_mean
from lowtide.optimizer.buckets import LEAST_BYTES, MOST_BYTES, storages_of
from lowtide.optimizer.groups import GroupSnapshot, same_value
from lowtide.optimizer.store import entries_of
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.optimizers import SWAP_ATTRIBUTE, bare_step, parameters_of
from lowtide.tensors.private import (
    OPTIMIZER_HOOKS,
    TorchDispatchMode,
    is_wrapped_by_scheduler,
    schema_of,
    storage_key,
    tree_leaves,
)
from lowtide.tensors.ranks import has_company
from lowtide.tensors.snapshot import Snapshot, take
from lowtide.tensors.view import Shape
from lowtide.tensors.wrappers import inside
from lowtide.units import format_bytes, parse_bytes

TIERS = ("host", "disk", "mapped")
OVERLAPS = ("auto", "step", "backward", "in_backward")


def check_names(tier: Any, overlap: Any) -> None:
    for name, value, known in (("tier", tier, TIERS), ("overlap", overlap, OVERLAPS)):
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise ConfigError(f"lowtide.swap_optimizer: {name} '{value}' is none of {', '.join(known)}{hint}")
    if tier == "mapped" and overlap == "backward":
        raise ConfigError(
            "lowtide.swap_optimizer: tier 'mapped' has no copies that backward could hide; use overlap 'step' or "
            "'in_backward'"
        )


def checked(
    optimizer: torch.optim.Optimizer, *, tier: Any, overlap: Any, resident: Any, bucket_bytes: Any, min_bytes: Any
) -> tuple[torch.device, float, int | None, int]:
    """The device of all parameters, the share that stays, the size of a bucket (None: it follows from the state), and
    that of the smallest tensor that moves. ConfigError for what cannot be."""
    check_names(tier, overlap)
    if isinstance(resident, bool) or not isinstance(resident, int | float) or not 0 <= resident <= 1:
        raise ConfigError(
            f"lowtide.swap_optimizer: resident is a share from 0 to 1, not {resident!r}; memory.optimizer: auto finds "
            "the share for a budget"
        )
    size = None if bucket_bytes == "auto" else _size_of("bucket_bytes", bucket_bytes)
    if size is not None and not LEAST_BYTES <= size <= MOST_BYTES:
        raise ConfigError(
            f"lowtide.swap_optimizer: bucket_bytes is 'auto' or from {LEAST_BYTES} bytes to "
            f"{format_bytes(MOST_BYTES)}, not {format_bytes(size)}; larger ones move no faster, and three are on the "
            "device at a time"
        )
    least = _size_of("min_bytes", min_bytes)
    device = check_optimizer(optimizer)
    if overlap == "in_backward":
        check_alone()
    return device, float(resident), size, least


def check_alone() -> None:
    """ConfigError where other ranks have a part in the gradients."""
    if has_company():
        raise ConfigError(
            "lowtide.swap_optimizer: overlap 'in_backward' is for one rank: when a gradient is there, those of other "
            "ranks are not; use 'backward'"
        )


def _size_of(name: str, value: Any) -> int:
    try:
        return parse_bytes(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"lowtide.swap_optimizer: {name}: {error}") from error


def check_optimizer(optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of all parameters. ConfigError for what cannot be swapped."""
    kind = type(optimizer).__name__
    if hasattr(optimizer, SWAP_ATTRIBUTE):
        raise ConfigError(f"lowtide.swap_optimizer: this {kind} is swapped already; call detach() of its handle first")
    for flag in ("capturable", "differentiable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise ConfigError(
                f"lowtide.swap_optimizer: {kind} with {flag}=True keeps its state where a graph has seen it; make it "
                f"with {flag}=False"
            )
    previous = vars(optimizer).get("step")
    is_own = getattr(previous, "__func__", None) is type(optimizer).step
    if previous is not None and not is_own and not is_wrapped_by_scheduler(previous):
        name = getattr(previous, "__qualname__", type(previous).__name__)
        raise ConfigError(
            f"lowtide.swap_optimizer: somebody has put {name} in place of {kind}.step; attach first, then wrap the step"
        )
    parameters = parameters_of(optimizer)
    if not parameters:
        raise ConfigError(f"lowtide.swap_optimizer: {kind} has no parameters; attach when it has some")
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise ConfigError(
            f"lowtide.swap_optimizer: {kind} has parameters on {' and '.join(devices)}; make one optimizer for each "
            "device, and swap each"
        )
    device = parameters[0].device
    if device.type == "meta":
        raise ConfigError("lowtide.swap_optimizer: the parameters have no memory yet (device 'meta'); attach later")
    refusal = why_not_exact(optimizer) or why_not_in_parts(optimizer)
    if refusal:
        raise ConfigError(f"lowtide.swap_optimizer: {refusal}")
    return device


def why_not_exact(optimizer: torch.optim.Optimizer) -> str:
    """Why parameters of this optimizer depend on each other in a step, so that a step in parts gives other bits than a
    whole one; empty where they do not.

    A parameter that is listed twice is stepped twice. State of one parameter in the memory of another one's is written
    by both; this is looked for in torch's own optimizers alone, since others share tables that they only read, and were
    tried in parts.
    """
    kind = type(optimizer).__name__
    group_of: dict[torch.Tensor, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            earlier = group_of.setdefault(parameter, number)
            if earlier != number:
                return _listed_twice(kind, parameter, f"in param_groups[{earlier}] and in param_groups[{number}]")
        if len(set(group["params"])) < len(group["params"]):
            parameter = next(p for p in group["params"] if sum(p is other for other in group["params"]) > 1)
            return _listed_twice(kind, parameter, f"twice in param_groups[{number}]")
    if not type(optimizer).__module__.startswith("torch.optim") or kind not in KNOWN:
        return ""
    spans = []
    for parameter in group_of:
        for key, value in entries_of(optimizer.state, parameter).items():
            for storage in storages_of([value]):
                shape = Shape.of(inside(value))
                spans.append((storage, shape.offset * shape.dtype.itemsize, shape.end_bytes(), key, parameter))
    spans.sort(key=lambda span: span[:2])
    for (storage, _, end, key, owner), (next_storage, start, _, next_key, next_owner) in itertools.pairwise(spans):
        if storage == next_storage and start < end and owner is not next_owner:
            return (
                f"{kind} has state of two parameters in the same memory ('{key}' of one of shape {list(owner.shape)}, "
                f"'{next_key}' of one of shape {list(next_owner.shape)}), so a step in parts would give other bits; "
                "give each of them a clone"
            )
    return ""


def _listed_twice(kind: str, parameter: torch.Tensor, where: str) -> str:
    return f"{kind} lists a parameter of shape {list(parameter.shape)} {where}, and so steps it twice; list it once"


def engine_for(wanted: EngineChoice, optimizer: torch.optim.Optimizer, tier: str) -> Engine:
    plan = Plan(layers=(), min_bytes=0, disk_path=default_directory() if tier == "disk" else None)
    return choose_engine(wanted, SimpleNamespace(parameters=lambda: parameters_of(optimizer)), plan)  # type: ignore[arg-type]


def tiers_from(engine: Engine, tier: str) -> tuple[str, ...]:
    """The tier that was asked for and the slower ones. The first slower tier is what 'host' means anywhere. 'mapped'
    is that one too, and no other. Raises ConfigError where the engine has no such tier, or cannot show it to kernels.
    """
    if tier == "host":
        return engine.tiers
    if tier == "mapped":
        slot, _ = engine.allocate_visible(LEAST_BYTES, engine.tiers[0])
        try:
            engine.in_place(slot)
        finally:
            engine.free(slot)
        return engine.tiers[:1]
    if tier not in engine.tiers:
        raise ConfigError(
            f"lowtide.swap_optimizer: the engine '{engine.name}' has no tier '{tier}'; it has {', '.join(engine.tiers)}"
        )
    return engine.tiers[engine.tiers.index(tier) :]


_ROUNDING = 1 + 1e-9
"""Of a share that stands for whole parameters."""


def first_ones(
    optimizer: torch.optim.Optimizer, share: float, min_bytes: int, *, largest_first: bool = False
) -> set[torch.Tensor]:
    """Parameters that have at most this share of the bytes of all, first ones first, or largest; of those whose state
    can move."""
    sizes = {p: inside(p.detach()).nbytes for p in parameters_of(optimizer)}
    left = share * sum(size for size in sizes.values() if size >= min_bytes) * _ROUNDING
    chosen = set()
    for parameter, size in sorted(sizes.items(), key=lambda pair: -pair[1]) if largest_first else sizes.items():
        if min_bytes <= size <= left:
            left -= size
            chosen.add(parameter)
    return chosen


# -- whether a class steps in parts ------------------------------------------------------------------------------------


KNOWN = frozenset(
    {
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    }
)
"""Classes of torch that are exact in parts."""
NUM_STEPS = 3
_PER_GROUP = 3
_LONGEST = 6
_SOME_RATE = 1e-3
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def why_not_in_parts(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimizer cannot be stepped in parts; '' where it can."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        return (
            f"{kind.__name__} evaluates the closure several times in a step, with all of its state; it stays as it is"
        )
    if kind.__module__.startswith("torch.optim") and kind.__name__ in KNOWN:
        return ""
    closure = inspect.signature(bare_step(kind)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{kind.__name__}.step cannot do without a closure, so it may evaluate it more than once"
    devices = {parameter.device for parameter in parameters_of(optimizer)}
    before = take(beside=optimizer, called=True, devices=devices)
    try:
        with _Writes(before):
            return _tried(optimizer, before)
    finally:
        moved = before.moved()
        before.restore()
        if moved:
            warnings.warn(
                f"lowtide: the trial of {kind.__name__} moved {moved[0]} on, which cannot be wound back, so training "
                "goes on from there; keep the position as a number if that matters.",
                stacklevel=4,
            )


class _Writes(TorchDispatchMode):
    """Tells a snapshot which bytes are about to be written: a step may reach parameters by a way of its own."""

    def __init__(self, before: Snapshot) -> None:
        super().__init__()
        self._before = before
        self._known = _storages([tensor for tensor, _ in before.tensors]).keys()
        """All that was there; what the twins make has none of these."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if schema_of(func).is_mutable:
            given = _storages((args, kwargs or {}))
            for key in given.keys() & self._known:
                self._before.about_to_write(given[key])
        return func(*args, **(kwargs or {}))


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and is_plain(leaf)]
    return {storage_key(storage): storage for storage in found}


def _take_steps(twin: torch.optim.Optimizer, step: Callable[..., Any], has_missing: bool) -> None:
    for number in range(NUM_STEPS):
        _set_gradients(twin, number, has_missing)
        step(twin)


def _tried(optimizer: torch.optim.Optimizer, before: Snapshot) -> str:
    """Why the optimizer cannot be stepped in parts, by the trial; '' where it can."""
    name, step = type(optimizer).__name__, bare_step(type(optimizer))
    for has_missing in (True, False):  # some optimizers want a gradient for every parameter
        before.restore()
        whole, parts = _twin(optimizer), _twin(optimizer)
        try:
            _take_steps(whole, step, has_missing)
            break
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    else:
        return f"{name} is not of torch, and could not be tried on small parameters ({why})"
    before.restore()
    try:
        _take_steps(parts, lambda twin: _step_in_parts(twin, step), has_missing)
    except Exception as error:
        return f"{name} cannot be stepped in parts ({type(error).__name__}: {error})"
    odd = _difference(whole, parts)
    if odd:
        return f"{name} cannot be stepped in parts: {odd} came out different in a trial on small parameters"
    if "closure" not in inspect.signature(step).parameters:
        return ""
    before.restore()
    return _tried_with_closure(optimizer, has_missing=has_missing)


def _tried_with_closure(optimizer: torch.optim.Optimizer, *, has_missing: bool) -> str:
    """Why the optimizer cannot have its closure evaluated once, before it steps; '' where it can, or never does."""
    name, step = type(optimizer).__name__, bare_step(type(optimizer))
    counts: Counter[torch.optim.Optimizer] = Counter()

    @torch.no_grad()
    def evaluate(twin: torch.optim.Optimizer) -> torch.Tensor:
        """Gradients that depend on the weights, and on how often it ran."""
        counts[twin] += 1
        loss = torch.zeros(())
        for parameter in parameters_of(twin):
            if parameter.grad is not None:
                parameter.grad = parameter.grad * counts[twin] + parameter
                loss = parameter.grad.abs().sum().cpu()
        return loss

    def in_parts(twin: torch.optim.Optimizer) -> None:
        evaluate(twin)
        _step_in_parts(twin, step)

    whole, parts = _twin(optimizer), _twin(optimizer)
    try:
        _take_steps(whole, lambda twin: step(twin, closure=functools.partial(evaluate, twin)), has_missing)
        if not counts[whole]:
            return ""
        _take_steps(parts, in_parts, has_missing)
    except Exception as error:
        return f"{name} could not be tried with a closure on small parameters ({type(error).__name__}: {error})"
    if counts[whole] == counts[parts] and not _difference(whole, parts):
        return ""
    return (
        f"{name} cannot be stepped in parts: it does not evaluate its closure once, before it steps "
        f"({counts[whole]} times in {NUM_STEPS} steps of a trial)"
    )


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with a few small parameters of its own and no state."""
    kind = type(optimizer)
    generator = torch.Generator().manual_seed(0)
    small: dict[int, torch.Tensor] = {}
    groups = [_small_group(group, small, generator) for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        if isinstance(group.get("lr"), float):  # rates that are equal now may differ later
            group["lr"] = (group["lr"] or _SOME_RATE) * (1 + number / 4)
    twin: torch.optim.Optimizer = kind.__new__(kind)
    everyone = {id(p) for p in parameters_of(optimizer)}
    for name, value in vars(optimizer).items():
        if name in OPTIMIZER_HOOKS:
            vars(twin)[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step"):
            vars(twin)[name] = _copied(value, small, everyone)
    twin.state = defaultdict(dict)
    twin.param_groups = groups
    return twin


def _small_group(group: dict[str, Any], small: dict[int, torch.Tensor], generator: torch.Generator) -> dict[str, Any]:
    chosen = []
    for number in range(_PER_GROUP):
        parameter = group["params"][number % len(group["params"])]
        local = inside(parameter.detach())
        shape = [min(size, _LONGEST + number) for size in local.shape]
        values = torch.randn(shape, generator=generator).to(local.dtype).to(local.device)
        chosen.append(values.requires_grad_(parameter.requires_grad))
        small.setdefault(id(parameter), chosen[-1])
    rest = {key: _copied(value, {}, set()) for key, value in group.items() if key not in ("params", "param_names")}
    names = {"param_names": [str(number) for number in range(_PER_GROUP)]} if "param_names" in group else {}
    return {"params": chosen, **rest, **names}


def _copied(value: Any, small: dict[int, torch.Tensor], everyone: set[int]) -> Any:
    """A copy in which small parameters stand for the real ones, and real ones without a small one are left out."""
    if isinstance(value, torch.Tensor):
        return small.get(id(value), value.detach().clone())
    if isinstance(value, dict):
        pairs = ((_copied(k, small, everyone), _copied(v, small, everyone)) for k, v in value.items())
        return type(value)(pairs) if type(value) in (dict, OrderedDict) else dict(pairs)
    if type(value) in (list, tuple, set):
        members = [m for m in value if id(m) not in everyone or id(m) in small]
        return type(value)(_copied(member, small, everyone) for member in members)
    return value


def _set_gradients(optimizer: torch.optim.Optimizer, number: int, has_missing: bool) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            values = torch.randn(parameter.shape, generator=generator)
            is_skipped = has_missing and number == 1 and index == 1
            parameter.grad = None if is_skipped else values.to(parameter.dtype).to(parameter.device)


def _step_in_parts(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    groups = optimizer.param_groups
    snapshot = GroupSnapshot(groups)
    chosen = [(number, [p]) for number, group in enumerate(groups) for p in group["params"] if p.grad is not None]
    for one in reversed(chosen):
        part = snapshot.subset([one])
        optimizer.param_groups = part
        try:
            step(optimizer)
        finally:
            optimizer.param_groups = groups
        snapshot.collect([one], part)
    snapshot.commit()


def _difference(whole: torch.optim.Optimizer, parts: torch.optim.Optimizer) -> str:
    for number, (one, other) in enumerate(zip(whole.param_groups, parts.param_groups, strict=True)):
        for p, q in zip(one["params"], other["params"], strict=True):
            if not same_value(p.detach(), q.detach()):
                return f"a parameter of param_groups[{number}]"
            mine, yours = whole.state.get(p, {}), parts.state.get(q, {})
            odd = next((key for key in {**mine, **yours} if not same_value(mine.get(key), yours.get(key))), None)
            if odd is not None:
                return f"state['{odd}']"
        odd = next((k for k in {**one, **other} if k != "params" and not same_value(one.get(k), other.get(k))), None)
        if odd is not None:
            return f"param_groups[{number}]['{odd}']"
    for key, value in vars(whole).items():
        if isinstance(value, (*_PLAIN, torch.Tensor)) and not same_value(value, vars(parts).get(key)):
            return f"its attribute '{key}'"
    for owner, value in whole.state.items():
        if not isinstance(owner, torch.Tensor) and not same_value(value, parts.state.get(owner)):
            return f"state['{owner}']"
    return ""
