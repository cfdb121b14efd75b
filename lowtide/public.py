"""The public functions that join what stands in several rooms.

What: `apply`, `optimize`, `observe`, `current`, `remove`, `write_report` and `selective_offload` of `lowtide`.
All others stand where their work is done; `lowtide/__init__.py` has the table.
Each function imports what it needs when it is called, so that one of them does not load the rooms of all.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.budget import parse_budget
from lowtide.core.plan import Plan
from lowtide.errors import ConfigError, check_function, wrong_argument

if TYPE_CHECKING:
    import torch

    from lowtide.config.memory import MemoryConfig
    from lowtide.core.profile import Profile
    from lowtide.engines.base import EngineChoice
    from lowtide.runtime.offload.selective import SelectiveOffload
    from lowtide.runtime.session.tide import Tide
    from lowtide.runtime.session.tides import Tides

_LOSS = "a function that makes the loss of the model's output"


def apply(
    model: torch.nn.Module,
    memory: Plan | MemoryConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    engine: EngineChoice = None,
    group: Any = None,
    first_layer: int | None = None,
    tp_group: Any = None,
) -> Tide | Tides:
    """Make `model` train by a memory plan, until `tide.remove()` or the end of `with tide:`.

    `memory` is a `Plan`, a `MemoryConfig`, a mapping with the keys of the `memory` section, or the path of a YAML
    file; with a budget in it, this is `optimize`. Gradients are the same to the bit; `state_dict` does not change.
    `engine` moves the bytes: an engine, the name of one ("accelerator", "host"), or a function that makes one for a
    plan; absent, it is chosen by the device of the model.
    A file or a mapping with MindSpore Transformers' `recompute_config` or `swap_config` means what it means there; the
    first forward pass is then observed (one extra step, after which everything is as before). If `model` is one stage
    of a pipeline, `first_layer` is the number that its first layer has in the whole model, from 0.
    `group`: the ranks that train the same layers and must have the same plan. Absent: all ranks; with `first_layer`,
    this rank alone. `tp_group`, the tensor-parallel process group, is for `recompute_slice_activation` of such a file.
    Raises `ConfigError` for a mistake in `memory`, such as a pattern that matches nothing.
    """
    from lowtide.config.memory import load_memory
    from lowtide.mindformers.follow import follow, sections_in
    from lowtide.runtime.session.apply import apply as apply_plan
    from lowtide.tensors.ranks import check_group

    check_group(group, "lowtide.apply")
    check_group(tp_group, "lowtide.apply", "tp_group")
    if first_layer is not None and (type(first_layer) is not int):
        raise wrong_argument("lowtide.apply", "first_layer", "the number of a layer, from 0", first_layer)
    _refuse_a_budget(memory)
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
        )
    if first_layer is not None:
        raise ConfigError("lowtide.apply: first_layer goes with a file that has recompute_config or swap_config only")
    if tp_group is not None:
        raise ConfigError("lowtide.apply: tp_group is for recompute_slice_activation of recompute_config; leave it out")
    if not isinstance(memory, Plan):
        memory = load_memory(memory)
        if memory.has_budget:
            return optimize(model, memory=memory, optimizer=optimizer, engine=engine, group=group)
    return apply_plan(model, memory, optimizer=optimizer, engine=engine, group=group)


def optimize(
    model: torch.nn.Module,
    budget: int | str | None = None,
    *,
    memory: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: EngineChoice = None,
    group: Any = None,
    strict: bool | None = None,
) -> Tides:
    """Make `model` train within `budget` bytes per device ("20GiB", "90%" or "auto"), until `remove()` or the end of
    the `with` block.

    lowtide observes the first forward pass (one extra step, after which everything is as before) and makes a plan from
    it. Later passes run under the plan. The first two of them correct it, and new shapes of inputs, or a model that has
    changed, get new plans. With several ranks (`group`) all use one plan, for the smallest budget. The logger `lowtide`
    gets a line about each plan (level INFO). Where no plan fits, the one with the smallest peak is used, and a warning
    says by how much it is over; with `strict` (also a key of `memory`), or where the device has less than that plan
    needs, it is a `BudgetError`. Without `optimizer`, the one that steps the model's parameters is found, and its state
    is counted from then on. Raises `ConfigError` at once for mistakes.
    """
    from lowtide.runtime.autopilot.autopilot import optimize as optimize_model
    from lowtide.runtime.autopilot.plan_model import merged_config

    config = merged_config(memory, budget)
    how: Any = {"optimizer": optimizer, "engine": engine, "group": group, "strict": strict}
    if config.weights != "keep":
        from lowtide.weights.planned import PlacedWeights

        how["place"] = functools.partial(PlacedWeights, model, config)
    return optimize_model(model, memory=config, **how)


def _refuse_a_budget(memory: Any) -> None:
    """`apply(model, "20GiB")` is meant for `optimize`, and "swap" for a rule, unless there is a file of that name."""
    if not isinstance(memory, str) or Path(memory).exists():
        return
    if memory in ("recompute", "swap"):
        raise ConfigError(
            f"lowtide.apply: '{memory}' alone is no plan; write lowtide.apply(model, {{'{memory}': 'all'}})"
        )
    try:
        parse_budget(memory)
    except ValueError:
        return
    raise ConfigError(
        f"lowtide.apply: '{memory}' is a budget, not a plan; write lowtide.optimize(model, budget='{memory}')"
    )


def observe(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Profile:
    """The profile of one real step of `model` on `batch` (as in `plan`): what it saves, where and for how long, and
    what each operator costs. Gradients, buffers and random state are left as they were. Raises `ConfigError` for a
    batch that does not fit the model or a loss that is not a scalar."""
    from lowtide.profiling.observe_step import observe as observe_step

    check_function("lowtide.observe", "loss", loss, _LOSS)
    return observe_step(model, batch, loss=loss, optimizer=optimizer)


def current(model: torch.nn.Module) -> Tide | Tides | None:
    """What `apply` or `optimize` gave for `model`, or for the model that it wraps (as DDP does); None if it is plain.

    For a notebook cell that runs again, or code that did not keep the handle.
    """
    from torch.nn import Module

    from lowtide.runtime.session.forward_patch import handle_of

    if not isinstance(model, Module):
        raise wrong_argument("lowtide.current and lowtide.remove", "model", "a torch.nn.Module", model)
    return handle_of(model)


def remove(model: torch.nn.Module) -> None:
    """Make `model` plain again: `remove()` of its handle, if it has one."""
    handle = current(model)
    if handle is not None:
        handle.remove()


def write_report(handle: torch.nn.Module | Tide | Tides, path: str | os.PathLike[str]) -> Path:
    """Write a report of a model under lowtide, or of its handle: the plan, and the memory and the lanes of a step.

    The form follows the name of `path`: `.html` (one file, opens offline; needs matplotlib, the extra `report`),
    `.trace.json` (for Perfetto), `.pickle` (a memory snapshot for pytorch.org/memory_viz) or `.json`. Returns the path.
    Raises `ConfigError` for other names, for a trace or a snapshot of a plan of rules alone, for a model that is not
    under lowtide, and before the first step.
    """
    from torch.nn import Module

    from lowtide.report.run_folder import report_of_handle
    from lowtide.report.write import check_form
    from lowtide.report.write import write_report as write
    from lowtide.runtime.session.tide import Tide
    from lowtide.runtime.session.tides import Tides

    check_form(path)
    in_force = current(handle) if isinstance(handle, Module) else handle
    if in_force is not None and not isinstance(in_force, Tide | Tides):
        raise wrong_argument(
            "lowtide.write_report", "handle", "a model, or what apply or optimize gave for it", in_force
        )
    if in_force is None:
        raise ConfigError(
            "lowtide.write_report: this model is not under lowtide; give it the model or the handle that is"
        )
    return write(report_of_handle(in_force), path)


def selective_offload(
    policy: Callable[..., Any],
    model: torch.nn.Module,
    *,
    host_budget: int | str | None = None,
    min_bytes: int | str = "1MiB",
    engine: EngineChoice = None,
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
