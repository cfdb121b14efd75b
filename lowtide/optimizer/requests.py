"""What `swap_optimizer` was asked for, and whether it can be: words for each mistake, before anything is touched.

What: checks of the arguments and of the optimizer, and what follows from them: the device, the engine, the tiers, the
parameters whose state stays. Why apart: each refusal is one sentence that says where, what, and the way out.
Cost: a look at each group. Not covered: whether a class of optimizers can be stepped in parts (trial.py).
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from lowtide.core.plan import Plan
from lowtide.engines.base import Engine, EngineChoice
from lowtide.engines.choose import choose_engine
from lowtide.engines.tiers.disk import default_directory
from lowtide.errors import ConfigError, did_you_mean
from lowtide.optimizer.buckets import LEAST_BYTES, MOST_BYTES, storages_of
from lowtide.optimizer.store import entries_of
from lowtide.optimizer.trial import KNOWN
from lowtide.tensors.optimizers import SWAP_ATTRIBUTE, parameters_of
from lowtide.tensors.private import is_wrapped_by_scheduler
from lowtide.tensors.ranks import has_company
from lowtide.tensors.view import Shape
from lowtide.tensors.wrappers import inside
from lowtide.units import format_bytes, parse_bytes

TIERS = ("host", "disk")
OVERLAPS = ("auto", "step", "backward", "in_backward")


def check_names(tier: Any, overlap: Any) -> None:
    if tier == "mapped":
        raise ConfigError(
            "lowtide.swap_optimizer: tier 'mapped' (kernels that read main memory in place) is not built: torch has no "
            "call for it without a compiled allocator; use 'host'"
        )
    for name, value, known in (("tier", tier, TIERS), ("overlap", overlap, OVERLAPS)):
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise ConfigError(f"lowtide.swap_optimizer: {name} '{value}' is none of {', '.join(known)}{hint}")


def share_of(resident: Any) -> float | None:
    """None: 'auto'."""
    if resident == "auto":
        return None
    if isinstance(resident, bool) or not isinstance(resident, int | float) or not 0 <= resident <= 1:
        raise ConfigError(f"lowtide.swap_optimizer: resident is 'auto' or a share from 0 to 1, not {resident!r}")
    return float(resident)


def why_none_stays() -> str:
    """Why `resident='auto'` cannot mean more than none here; empty where it can."""
    return "there are several ranks, which must step alike: give a share" if has_company() else ""


def check_alone() -> None:
    """ConfigError where other ranks have a part in the gradients."""
    if has_company():
        raise ConfigError(
            "lowtide.swap_optimizer: overlap 'in_backward' is for one rank: when a gradient is there, those of other "
            "ranks are not; use 'backward'"
        )


def size_of(name: str, value: Any) -> int:
    try:
        return parse_bytes(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"lowtide.swap_optimizer: {name}: {error}") from error


def bucket_bytes_of(value: Any) -> int:
    size = size_of("bucket_bytes", value)
    if not LEAST_BYTES <= size <= MOST_BYTES:
        raise ConfigError(
            f"lowtide.swap_optimizer: bucket_bytes is 'auto' or from {LEAST_BYTES} bytes to "
            f"{format_bytes(MOST_BYTES)}, not {format_bytes(size)}; larger ones move no faster, and three are on the "
            "device at a time"
        )
    return size


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
    odd = why_not_exact(optimizer)
    if odd:
        raise ConfigError(f"lowtide.swap_optimizer: {odd}")
    return device


def why_not_exact(optimizer: torch.optim.Optimizer) -> str:
    """Why parameters of this optimizer depend on each other in a step, so that a step in parts gives other bits than a
    whole one; empty where they do not.

    A parameter that is listed twice is stepped twice. State of one parameter in the memory of another one's is written
    by both; this is looked for in torch's own optimizers alone, since others share tables that they only read, and were
    tried in parts (trial.py).
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
    """The tier that was asked for and the slower ones. The first slower tier is what 'host' means anywhere."""
    if tier == "host":
        return engine.tiers
    if tier not in engine.tiers:
        raise ConfigError(
            f"lowtide.swap_optimizer: the engine '{engine.name}' has no tier '{tier}'; it has {', '.join(engine.tiers)}"
        )
    return engine.tiers[engine.tiers.index(tier) :]


def first_ones(optimizer: torch.optim.Optimizer, share: float, min_bytes: int) -> set[torch.Tensor]:
    """Parameters that have at most this share of the bytes of all, first ones first; of those whose state can move."""
    sizes = {p: inside(p.detach()).nbytes for p in parameters_of(optimizer)}
    left = share * sum(size for size in sizes.values() if size >= min_bytes)
    chosen = set()
    for parameter, size in sizes.items():
        if min_bytes <= size <= left:
            left -= size
            chosen.add(parameter)
    return chosen
