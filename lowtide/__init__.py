"""lowtide: fit training into the memory you have, at the smallest cost in time, with the same gradients to the bit.

This module is the whole public surface. Importing it imports neither torch nor transformers: its functions import
what they need when they are called, so that `lowtide --help` and editors stay fast.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lowtide.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lowtide.config.memory import MemoryConfig
    from lowtide.core.plan import Plan
    from lowtide.core.profile import Profile
    from lowtide.engines.base import Engine
    from lowtide.errors import BudgetError, ConfigError, PartialStepError
    from lowtide.optimizer.swap import OptimizerSwap
    from lowtide.runtime.autopilot.autopilot import Autopilot
    from lowtide.runtime.offload.selective import SelectiveOffload
    from lowtide.runtime.session.tide import Tide
    from lowtide.timeline.hardware import Hardware


__all__ = [
    "BudgetError",
    "ConfigError",
    "PartialStepError",
    "Plan",
    "Profile",
    "Tide",
    "__version__",
    "apply",
    "cross_entropy",
    "current",
    "observe",
    "optimize",
    "plan",
    "remove",
    "selective_offload",
    "swap_optimizer",
    "write_report",
]

_HOMES = {
    "BudgetError": "lowtide.errors",
    "ConfigError": "lowtide.errors",
    "PartialStepError": "lowtide.errors",
    "Plan": "lowtide.core.plan",
    "Profile": "lowtide.core.profile",
    "Tide": "lowtide.runtime.session.tide",
}


def apply(
    model: torch.nn.Module,
    memory: Plan | MemoryConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
    group: Any = None,
    first_layer: int | None = None,
    tp_group: Any = None,
    say: Callable[[str], None] | None = None,
) -> Tide | Autopilot:
    """Make `model` train by a memory plan, until `tide.remove()` or the end of `with tide:`.

    `memory` is a `Plan`, a `MemoryConfig`, a mapping with the keys of the `memory` section, or the path of a YAML
    file. `engine` is an engine or the name of one; absent, it is chosen by the device of the model. Gradients
    are the same to the bit; `state_dict` does not change.
    If `memory` has a budget, this is `optimize`; `say` gets a line when a plan is made.
    A file or a mapping with MindSpore Transformers' `recompute_config` or `swap_config` means what it means there; the
    first forward pass is then observed (one extra step, after which everything is as before). If `model` is one stage
    of a pipeline, `first_layer` is the number that its first layer has in the whole model, from 0.
    `group`: the ranks that train the same layers and must have the same plan. Absent: all ranks; with `first_layer`,
    this rank alone. `tp_group`, the tensor-parallel process group, is for `recompute_slice_activation` of such a file.
    Raises `ConfigError` for a mistake in `memory`, such as a pattern that matches nothing.
    """
    from lowtide.config.memory import load_memory
    from lowtide.core.plan import Plan
    from lowtide.mindformers.follow import follow, sections_in
    from lowtide.runtime.session.apply import apply as apply_plan

    sections = sections_in(memory)
    if sections is not None:
        return follow(
            model,
            sections,
            optimizer=optimizer,
            engine=engine,
            group=group,
            first_layer=first_layer,
            tp_group=tp_group,
            say=say,
        )
    _refuse_without_sections(first_layer, tp_group)
    if not isinstance(memory, Plan):
        memory = load_memory(memory)
        if memory.has_budget:
            return optimize(model, memory=memory, optimizer=optimizer, engine=engine, group=group, say=say)
    return apply_plan(model, memory, optimizer=optimizer, engine=engine, group=group)


def _refuse_without_sections(first_layer: int | None, tp_group: Any) -> None:
    from lowtide.errors import ConfigError

    if first_layer is not None:
        raise ConfigError("lowtide.apply: first_layer goes with a file that has recompute_config or swap_config only")
    if tp_group is not None:
        raise ConfigError("lowtide.apply: tp_group is for recompute_slice_activation of recompute_config; leave it out")


def plan(
    model: torch.nn.Module,
    batch: Any,
    *,
    budget: int | str | None = None,
    memory: MemoryConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hardware: Hardware | str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan for one step of `model` on `batch` whose peak of device bytes stays within `budget`.

    Traces with fake tensors: runs no training step, needs no device and no memory. `batch` is a mapping
    (`model(**batch)`), a tuple (`model(*batch)`) or a callable without arguments that returns the loss; the loss is the
    output itself, its `.loss`, or `loss(output)`. `budget` is bytes or text: "20GiB", "90%" of the device, "auto" (what
    it has less a headroom); `memory` may set limits by rules, or have a `preset` instead of a budget. `hardware` is a
    name (`h200`, `ascend910b`, `cpu`, ...), a TOML file, or absent: that of the model's device.
    Raises `BudgetError` when no plan fits, `ConfigError` for every other mistake.
    """
    from lowtide.runtime.autopilot.plan_model import plan_model

    return plan_model(
        model,
        batch,
        budget=budget,
        memory=memory,
        host_budget=host_budget,
        optimizer=optimizer,
        hardware=hardware,
        loss=loss,
        progress=progress,
    )


def observe(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Profile:
    """Run one real step of `model` on `batch` (as in `plan`) and say what it saves, where, for how long, and what each
    operator costs. Gradients, buffers and random state are left as they were. Raises `ConfigError` for a batch that
    does not fit the model or a loss that is not a scalar."""
    from lowtide.profiling.observe_step import observe as observe_step

    return observe_step(model, batch, loss=loss, optimizer=optimizer)


def optimize(
    model: torch.nn.Module,
    *,
    budget: int | str | None = None,
    memory: MemoryConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
    group: Any = None,
    say: Callable[[str], None] | None = None,
    strict: bool | None = None,
) -> Autopilot:
    """Make `model` train within `budget` bytes per device ("20GiB", "90%" or "auto"), until `remove()` or the end of
    the `with` block.

    lowtide observes the first forward pass (one extra step, after which everything is as before) and makes a plan from
    it. Later passes run under the plan. The first two of them correct it, and new shapes of inputs, or a model that has
    changed, get new plans. With several ranks (`group`) all use one plan, for the smallest budget. `say` gets a line
    when a plan is made. Where no plan fits, the one with the smallest peak is used, with a warning that says by how
    much it is over. `strict` (also in `memory`): that is a `BudgetError`, as it is where the device has no room for
    that plan. Without `optimizer`, the one that steps the model's parameters is found, and its state counted from then
    on. Raises `ConfigError` at once for mistakes.
    """
    from lowtide.runtime.autopilot.optimize import optimize as optimize_model

    how: Any = {"engine": engine, "group": group, "say": say, "strict": strict}
    return optimize_model(model, budget=budget, memory=memory, optimizer=optimizer, **how)


def current(model: torch.nn.Module) -> Tide | Autopilot | None:
    """What `apply` or `optimize` gave for `model`, or for the model that it wraps (as DDP does); None if it is plain.

    For a notebook cell that runs again, or code that did not keep the handle.
    """
    from lowtide.runtime.session.forward_patch import handle_of

    return handle_of(model)


def remove(model: torch.nn.Module) -> None:
    """Make `model` plain again: `remove()` of its handle, if it has one."""
    handle = current(model)
    if handle is not None:
        handle.remove()


def write_report(handle: torch.nn.Module | Tide | Autopilot, path: str | os.PathLike[str]) -> Path:
    """Write what `handle`, or the model that it is on, does and did: its plan, the memory and the lanes of a step.

    The form follows the name of `path`: `.html` (one file, opens offline; needs matplotlib, the extra `report`),
    `.trace.json` (for Perfetto), `.pickle` (a memory snapshot for pytorch.org/memory_viz) or `.json`. Gives the path.
    Raises `ConfigError` for other names, for a trace or a snapshot of a plan of rules alone, for a model that is not
    under lowtide, and before the first step.
    """
    from torch.nn import Module

    from lowtide.errors import ConfigError
    from lowtide.report.of_handle import report_of_handle
    from lowtide.report.write import check_form
    from lowtide.report.write import write_report as write

    check_form(path)
    found = current(handle) if isinstance(handle, Module) else handle
    if found is None:
        raise ConfigError(
            "lowtide.write_report: this model is not under lowtide; give it the model or the handle that is"
        )
    return write(report_of_handle(found), path)


def selective_offload(
    policy: Callable[..., Any],
    model: torch.nn.Module,
    *,
    host_budget: int | str | None = None,
    min_bytes: int | str = "1MiB",
    engine: Engine | str | None = None,
) -> SelectiveOffload:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint` that follows `policy`, and really offloads what it marks
    as `CheckpointPolicy.MUST_CPU_OFFLOAD` or `PREFER_CPU_OFFLOAD`, which torch recomputes in eager mode. Gradients are
    the same to the bit as with the policy that saves these outputs.

    `policy(ctx, op, *args, **kwargs)` is the function that `create_selective_checkpoint_contexts` takes. Activations
    leave the device of `model`. `host_budget`: cap on main memory for what is offloaded. An output below `min_bytes`
    that PREFER_CPU_OFFLOAD marks is saved. `engine`: as in `apply`. Raises `ConfigError` for mistakes.
    """
    from lowtide.config.memory import load_memory
    from lowtide.runtime.offload.selective import SelectiveOffload

    sizes = load_memory({"min_bytes": min_bytes} | ({} if host_budget is None else {"host_budget": host_budget}))
    return SelectiveOffload(policy, model, host_bytes=sizes.host_budget, min_bytes=sizes.least_bytes, engine=engine)


def swap_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    tier: str = "host",
    overlap: str = "auto",
    resident: float | str = "auto",
    bucket_bytes: int | str = "auto",
    engine: Engine | str | None = None,
    min_bytes: int | str = 16 * 1024,
) -> OptimizerSwap:
    """Keep the state of `optimizer` in main memory or a file between steps, until `detach()` of the handle or the end
    of its `with` block. Parameters, state and `param_groups` are the same to the bit; the optimizer stays the object
    that it is.

    `tier`: "host", the first tier below the device (main memory; for a model on the CPU a file), or "disk".
    `overlap`: when copies run; "auto" chooses. `resident`: the share of parameters whose state stays on the device;
    "auto": as much as the first steps show to be free.
    `bucket_bytes`: how much is copied at once; about three times as much is on the device in a step. State smaller than
    `min_bytes` stays where it is. `engine`: as in `apply`.
    Raises `ConfigError` for optimizers that cannot be stepped in parts, and for every other mistake.
    """
    from lowtide.optimizer.swap import swap_optimizer as swap

    return swap(
        optimizer,
        tier=tier,
        overlap=overlap,
        resident=resident,
        bucket_bytes=bucket_bytes,
        engine=engine,
        min_bytes=min_bytes,
    )


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    upcast: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    first_word: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(logits, labels, ...)` in slices of rows: the loss and the gradient of the
    logits are the same to the bit, in a third of the memory (loss/cross_entropy.py).

    logits: `[rows, words]`. labels: `[rows]`, int64. `upcast`: as `cross_entropy(logits.float(), ...)`, for logits in
    bf16 or fp16. `z_loss`: so many times the square of `torch.logsumexp(logits, 1)` is added, as the mean (or sum) over
    the rows that are not ignored. Raises `ConfigError` for other shapes, types and ranges. With a `weight` of classes
    the loss is torch's own; so it is where slices have other bits on this machine, and then a warning says so. There is
    no second derivative, and the logits must stay as they are until the backward pass; both raise RuntimeError.

    Where the words are spread over ranks, logits are a DTensor that is sharded over them, or this rank's part with the
    process `group`: `[rows, words of this rank]`, from `first_word` on (absent: all ranks have equally many). The loss
    is that of the whole vocabulary on every rank, to the bit that of torch's `loss_parallel`, with two all-reduces in
    place of three (loss/parallel.py). Collective.
    """
    from lowtide.loss.checked import cross_entropy as checked

    return checked(
        logits,
        labels,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        upcast=upcast,
        group=group,
        first_word=first_word,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
