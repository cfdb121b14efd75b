"""A tide: one model under one plan, from `apply` to `remove()`.

What: `apply` finds the layers, checks the rules against the model, puts one wrapper on the model, on each layer and on
each module that is to be recomputed, and returns a `Tide` that shows what happened and can undo everything.

A pattern may name an operator, and operators are known only after a forward pass has run; such patterns are checked at
the end of the first forward, everything else at once.

Under several ranks `apply` is collective: the ranks compare what they were asked for, and refuse together.

Not covered: budgets and optimizer state (later issues of the same engine), compiled models, `nn.DataParallel`.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.catalog.layers import find_layers, named_layers
from lowtide.config.native import MemoryConfig, load_memory
from lowtide.errors import ConfigError
from lowtide.planner.fate import Fate
from lowtide.planner.plan import Plan
from lowtide.planner.rules import Rule, Rules, unmatched_error
from lowtide.runtime.anchors import anchor_points
from lowtide.runtime.audit import Audit
from lowtide.runtime.engines.base import Engine
from lowtide.runtime.engines.choose import choose_engine
from lowtide.runtime.guard import Guard
from lowtide.runtime.handle import open_handle
from lowtide.runtime.hooks import Scope
from lowtide.runtime.patch import ForwardPatch, patched_module
from lowtide.runtime.recompute import is_checkpoint_hook, top_hooks
from lowtide.runtime.rollback import Rollback, tighter
from lowtide.runtime.sites_seen import warn_about_other_sites, with_bytes_seen
from lowtide.runtime.stats import Counters, Ledger, Stats
from lowtide.runtime.swap import Mover
from lowtide.runtime.tables import Region, Setting
from lowtide.runtime.weaver import nodes_of
from lowtide.units import format_bytes


def apply(
    model: nn.Module,
    memory: Plan | MemoryConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
) -> Tide:
    """Carry out `memory` on `model` until `tide.remove()`. See `lowtide.apply`."""
    _refuse_unsuitable(model)
    plan = _plan_of(model, memory)
    _check_patterns(model, plan)
    _agree_across_ranks(plan)
    _warn_about_checkpointing(model)
    _warn_about_parts_of_recomputed_layers(model, plan)
    chosen = choose_engine(engine, model, plan)
    _warn_about_tiers(plan, chosen)
    return Tide(model, plan, optimizer, chosen, owns_engine=chosen is not engine)


class Tide:
    """A model under a plan. A context manager: leaving it removes it. All sizes in bytes, times in seconds."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: torch.optim.Optimizer | None,
        engine: Engine,
        *,
        owns_engine: bool,
    ) -> None:
        self.model = model
        self.engine = engine
        self._plan = plan
        self._optimizer = optimizer
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._counters = Counters()
        self._ledger = Ledger()
        self._mover = Mover(engine, self._counters, self._ledger)
        if owns_engine:
            # It must outlive every graph that still holds activations: the last of them takes it down. An engine that
            # the caller made is the caller's to close.
            weakref.finalize(self._mover, engine.close)
        self._guard: Guard | None = None
        self._setting = self._setting_of(plan)
        self._rollback = Rollback(
            model,
            optimizer,
            counters=lambda: self._counters,
            settle=self.settle,
            tighten=self._tighten,
            describe_floor=self._describe_floor,
        )
        self._has_checked_sites = not plan.is_solved
        self._local = threading.local()
        self._unchecked = _rules_about_ops(model, plan)
        self._stall_base_seconds = engine.stall_seconds()
        self._patches = self._wrap()
        self._is_removed = False

    # -- what the user sees ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, with the sites that the first forward showed. A solved plan stays what it was; the bytes are those
        that were seen, and what it did not know is at its end."""
        seen = self._setting.sites
        if not self._plan.is_solved:
            return self._plan.with_sites(seen.values())
        known = [with_bytes_seen(site, seen.get(site.name)) for site in self._plan.sites]
        return self._plan.with_sites([*known, *(seen[name] for name in self._setting.unplanned)])

    @property
    def stats(self) -> Stats:
        """A snapshot of what happened since `apply` or the last `reset_stats()`."""
        counters, in_use = self._counters, self.engine.memory_in_use()
        peak_bytes = self.engine.device_peak_bytes()
        if peak_bytes is None:
            peak_bytes = self._model_state_bytes() + self._ledger.peak_bytes
        return Stats(
            saved_bytes=counters.kept_bytes
            + counters.swapped_bytes
            + counters.recomputed_bytes
            - counters.anchor_bytes,
            kept_bytes=counters.kept_bytes,
            swapped_bytes=counters.swapped_bytes,
            recomputed_bytes=counters.recomputed_bytes,
            anchor_bytes=counters.anchor_bytes,
            copied_out_bytes=counters.copied_out_bytes,
            copied_in_bytes=counters.copied_in_bytes,
            aliased_bytes=counters.aliased_bytes,
            peak_device_bytes=peak_bytes,
            stall_seconds=counters.stall_seconds + self.engine.stall_seconds() - self._stall_base_seconds,
            num_divergences=counters.num_divergences,
            num_unplanned=len(self._setting.unplanned),
            num_kept_for_lack_of_room=counters.num_kept_for_lack_of_room,
            num_forwards=counters.num_forwards,
            num_stepped_aside=counters.num_stepped_aside,
            num_spills=counters.num_spills,
            spilled_bytes=counters.spilled_bytes,
            num_over_limit=counters.num_over_limit,
            num_retries=counters.num_retries,
            host_bytes=in_use.get("host", 0),
            disk_bytes=in_use.get("disk", 0),
        )

    def reset_stats(self) -> None:
        """Start all totals, and the peak, anew."""
        self._counters.reset()
        self._ledger.restart_peak()
        self._stall_base_seconds = self.engine.stall_seconds()
        self.engine.reset_device_peak()

    def audit(self) -> Audit:
        """A context manager around steps of your own: `audit.peak_bytes` is the exact peak on the device inside."""
        return Audit(self.model, self._optimizer, self._mover, self.engine.device_type)

    def set_limit(self, limit_bytes: int | None) -> None:
        """Spill kept activations before live bytes on the device pass this limit; None: no limit.

        A safety net under a plan, not a plan: see runtime/guard.py. It holds from the next forward pass on.
        """
        assert limit_bytes is None or limit_bytes >= 0
        self._guard = None
        if limit_bytes is not None:
            self._guard = Guard(
                limit_bytes,
                mover=self._mover,
                counters=self._counters,
                ledger=self._ledger,
                min_bytes=self._plan.min_bytes,
                state_bytes=self._model_state_bytes,
            )
        self._setting.guard = self._guard

    def step(self, closure: Callable[[], Any], *, is_local: bool = False) -> Any:
        """What `closure()` returns: forward and backward of one micro-batch, which runs again if memory ran out.

        After an out-of-memory error everything that the micro-batch changed is put back, the plan is tightened (all
        swapped, then all layers recomputed), and the closure runs again, at most twice; gradients are those of a step
        that never failed. The closure must do the same each time: draw the batch outside of it, and leave `zero_grad`,
        clipping and the optimizer's step outside too. In a process group nothing is run again, because the other ranks
        would wait for this one in their collectives, unless `is_local` says that the closure has none.
        See runtime/rollback.py.
        """
        return closure() if self._is_removed else self._rollback.run(closure, is_local=is_local)

    def settle(self) -> None:
        """Wait until no copy is under way, and give back what dead graphs owned. Not needed for correctness."""
        self._mover.settle()

    def remove(self) -> None:
        """Restore the model exactly. Graphs that are still alive keep working. Idempotent."""
        if self._is_removed:
            return
        self._is_removed = True
        for patch in reversed(self._patches):
            patch.undo()
        self._mover.close()

    def __enter__(self) -> Tide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "removed" if self._is_removed else "applied"
        return f"<lowtide.Tide {state}: {len(self._plan.layers)} layers on engine '{self.engine.name}'>"

    def _model_state_bytes(self) -> int:
        """Parameters, buffers, gradients and optimizer state: unique dense storages on this engine's device."""
        tensors: list[Any] = [*self.model.parameters(), *self.model.buffers()]
        tensors += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if self._optimizer is not None:
            tensors += [value for state in self._optimizer.state.values() for value in state.values()]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors
            if isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
            and tensor.device.type == self.engine.device_type
        }
        return sum(storages.values())

    # -- out of memory ---------------------------------------------------------------------------------------------

    def _tighten(self, error: BaseException) -> str | None:
        """Go over to a plan that needs less; says how, or None when there is none. Called between two attempts."""
        has_room = bool(self.engine.tiers) and not self._counters.num_kept_for_lack_of_room
        smaller = tighter(self._plan, has_room=has_room)
        if smaller is None:
            return None
        for patch in reversed(self._patches):
            patch.undo()
        self._plan, how = smaller
        self._setting = self._setting_of(self._plan)
        self._unchecked, self._has_checked_sites = [], True
        self._patches = self._wrap()
        return how

    def _describe_floor(self) -> str:
        return (
            f"Parameters, gradients, buffers and optimizer state alone are "
            f"{format_bytes(self._model_state_bytes())}, and activations took up to "
            f"{format_bytes(self._ledger.peak_bytes)} more."
        )

    # -- how it works ----------------------------------------------------------------------------------------------

    def _setting_of(self, plan: Plan) -> Setting:
        return Setting(
            model=self.model,
            rules=plan.rules,
            stay_rules=_without_recompute(plan.rules),
            min_bytes=plan.min_bytes,
            device_type=self.engine.device_type,
            mover=self._mover,
            counters=self._counters,
            ledger=self._ledger,
            nodes=nodes_of(plan, self.model) if plan.is_solved else None,
            guard=self._guard,
        )

    def _wrap(self) -> list[ForwardPatch]:
        modules = dict(self.model.named_modules())
        layers = self._plan.layers
        patches = []
        # Innermost: an anchor of a layer, or of the model, is caught inside its region.
        for points in anchor_points((self._setting.nodes or {}).values(), modules):
            patches.append(ForwardPatch(modules[points.name], points.around(self._open)))
        for name in _recomputed_modules(modules, self._plan):
            patches.append(ForwardPatch(modules[name], self._around_module(modules[name])))
        for name in layers:
            patches.append(ForwardPatch(modules[name], self._around_region(self._region(name, modules[name]))))
        if "" not in layers:
            patches.append(ForwardPatch(self.model, self._around_region(self._region("", self.model))))
        return patches

    def _open(self) -> Scope | None:
        return getattr(self._local, "scope", None)

    def _region(self, name: str, module: nn.Module) -> Region:
        rules = self._plan.rules
        is_recomputed = name in self._plan.layers and rules.decide(name, is_site=False).fate is Fate.RECOMPUTE
        fallback = self._setting.stay_rules.decide(name, is_site=False)
        return Region(name, module, is_recomputed, fallback)

    def _around_region(self, region: Region) -> Callable[[Callable, tuple, dict], Any]:
        def around(forward: Callable, args: tuple, kwargs: dict) -> Any:
            scope: Scope | None = getattr(self._local, "scope", None)
            if scope is None:
                return self._open_scope(region, forward, args, kwargs)
            if region.name == "" or not scope.is_innermost():
                return forward(*args, **kwargs)
            with scope.inside(region):
                output = _run(scope, region, forward, args, kwargs)
            if self._guard is not None:
                self._guard.check(self._device)
            return output

        return around

    def _around_module(self, module: nn.Module) -> Callable[[Callable, tuple, dict], Any]:
        is_leaf = next(module.children(), None) is None

        def around(forward: Callable, args: tuple, kwargs: dict) -> Any:
            scope: Scope | None = getattr(self._local, "scope", None)
            if scope is None or not torch.is_grad_enabled() or not scope.is_innermost():
                return forward(*args, **kwargs)
            if is_leaf:
                return scope.discarded(module, forward, args, kwargs)
            return scope.checkpointed(module, forward, args, kwargs)

        return around

    def _open_scope(self, region: Region, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not _can_hook():
            return forward(*args, **kwargs)
        hooks = top_hooks()
        if is_checkpoint_hook(hooks):
            self._counters.num_stepped_aside += 1
            return forward(*args, **kwargs)
        if hooks is not None:
            raise _foreign_hooks_error(hooks)
        if self._guard is not None:
            self._guard.begin()
        scope = Scope(self._setting, region)
        self._local.scope = scope
        try:
            with (
                scope.inside(region),
                torch.autograd.graph.saved_tensors_hooks(scope.pack_hook, open_handle),
            ):
                output = _run(scope, region, forward, args, kwargs)
        finally:
            self._local.scope = None
            scope.close()
        self._counters.num_forwards += 1
        if self._unchecked and region.tables:
            self._check_ops(is_whole=region.name == "")
        if not self._has_checked_sites and region.name == "" and region.tables:
            self._has_checked_sites = True
            warn_about_other_sites(self._setting)
        return output

    def _check_ops(self, is_whole: bool) -> None:
        """After the first forward, every name is known: a rule that matched nothing is an error now."""
        names = self._setting.seen_names | set(dict(self.model.named_modules()))
        self._unchecked = Rules(tuple(self._unchecked)).unmatched(names) if is_whole else self._unchecked
        if not is_whole or not self._unchecked:
            return
        rule, self._unchecked = self._unchecked[0], []
        raise unmatched_error(rule, sorted(names))


def _run(scope: Scope, region: Region, forward: Callable, args: tuple, kwargs: dict) -> Any:
    if region.is_recomputed and torch.is_grad_enabled():
        return scope.checkpointed(region.module, forward, args, kwargs)
    return forward(*args, **kwargs)


def _can_hook() -> bool:
    """Not without gradients, not under torch.func or a compiler, and not in a recompute inside a backward pass."""
    return (
        torch.is_grad_enabled()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and torch._C._current_graph_task_id() == -1
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


# -- checks --------------------------------------------------------------------------------------------------------


def _refuse_unsuitable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.apply: expected a torch.nn.Module, not {type(model).__name__}")
    under = patched_module(model)
    if under is not None:
        what = f"its module '{under}'" if under else "this model"
        raise ConfigError(f"lowtide.apply: {what} is already under a lowtide plan; call remove() on that tide first")
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "lowtide.apply: nn.DataParallel is not supported, its replicas cannot be told apart; use "
            "DistributedDataParallel, one process a device"
        )
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        raise ConfigError("lowtide.apply: a compiled model has no eager forward to follow; apply to the original model")


def _plan_of(model: nn.Module, memory: Any) -> Plan:
    if isinstance(memory, Plan):
        named_layers(model, memory.layers)
        return memory
    config = load_memory(memory)
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    return Plan.from_rules(config, layers)


def _module_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _matches_a_module(rule: Rule, names: list[str]) -> bool:
    return any(rule.pattern.matches(name, is_site=False) for name in names)


def _rules_about_ops(model: nn.Module, plan: Plan) -> list[Rule]:
    """Rules that match no module: they may still match operators, which the first forward shows."""
    names = _module_names(model)
    return [rule for rule in plan.rules.rules if not _matches_a_module(rule, names) and rule.pattern.text != "*"]


def _check_patterns(model: nn.Module, plan: Plan) -> None:
    names = _module_names(model)
    for rule in plan.rules.rules:
        if rule.fate is Fate.RECOMPUTE and rule.pattern.text == "*":
            if not plan.layers:
                raise ConfigError(
                    f"{_at(rule)}recompute: all needs layers, and no repeated block was found in this model; name "
                    "them with layers: [...]"
                )
            continue
        if rule.pattern.text == "*" or _matches_a_module(rule, names):
            continue
        if rule.fate is Fate.RECOMPUTE:
            error = unmatched_error(rule, names)
            raise ConfigError(
                f"{error} (recompute acts on layers and modules; single operators can be kept or swapped)"
            )
        if not _may_be_an_op(rule, names):
            raise unmatched_error(rule, names)


def _may_be_an_op(rule: Rule, names: list[str]) -> bool:
    """Everything but the last part of the pattern matches a module, or there is nothing else."""
    segments = rule.pattern.segments
    if len(segments) == 1:
        return True
    above = type(rule.pattern)(text=rule.pattern.text.rpartition(".")[0], segments=segments[:-1])
    return any(above.matches(name, is_site=False) for name in names)


def _at(rule: Rule) -> str:
    return f"{rule.where}: " if rule.where else ""


def _recomputed_modules(modules: dict[str, nn.Module], plan: Plan) -> list[str]:
    """Modules, outermost first, that a recompute rule names and that are neither layers nor around or in such a one."""
    rules = plan.rules
    chosen: list[str] = []
    for name in modules:
        if not name or name in plan.layers or any(layer.startswith(name + ".") for layer in plan.layers):
            continue
        decision = rules.decide(name, is_site=False)
        if decision.fate is not Fate.RECOMPUTE or decision.rule is None:
            continue
        layer = next((layer for layer in plan.layers if name.startswith(layer + ".")), None)
        if layer is None and decision.rule.pattern.text == "*":
            continue
        if layer is not None and rules.decide(layer, is_site=False).fate is Fate.RECOMPUTE:
            continue
        if not any(name.startswith(outer + ".") for outer in chosen):
            chosen.append(name)
    return chosen


def _without_recompute(rules: Rules) -> Rules:
    return Rules(tuple(rule for rule in rules.rules if rule.fate is not Fate.RECOMPUTE))


def _agree_across_ranks(plan: Plan) -> None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, plan.digest())
    if len(set(digests)) > 1:
        listed = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
        raise ConfigError(
            f"lowtide.apply: the ranks were given different memory plans ({listed}); give every rank the same rules"
        )


def _warn_about_checkpointing(model: nn.Module) -> None:
    names = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True]
    if names:
        warnings.warn(
            f"lowtide: {len(names)} modules of this model already use gradient checkpointing ('{names[0]}', ...). They "
            "are left as they are, and rules act on their inputs only; switch it off to let lowtide decide "
            "(model.gradient_checkpointing_disable()).",
            stacklevel=4,
        )


def _warn_about_parts_of_recomputed_layers(model: nn.Module, plan: Plan) -> None:
    """A recomputed layer keeps nothing but its inputs: a rule about a part of it has no effect there, and says so."""
    recomputed = [name for name in plan.layers if plan.rules.decide(name, is_site=False).fate is Fate.RECOMPUTE]
    names = _module_names(model)
    for rule in plan.rules.rules:
        if rule.fate is Fate.RECOMPUTE or rule.pattern.text == "*":
            continue
        matched = [name for name in names if rule.pattern.matches(name, is_site=False)]
        inside = {layer for layer in recomputed for name in matched if name.startswith(layer + ".")}
        inside -= {layer for layer in inside if rule.pattern.matches(layer, is_site=False)}
        if inside:
            first = next(layer for layer in recomputed if layer in inside)
            others = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
            warnings.warn(
                f"lowtide: {_at(rule)}{rule} has no effect inside '{first}'{others}: a recomputed layer holds on to "
                "nothing but its inputs. To treat its parts differently, name the modules to recompute instead of the "
                "layer.",
                stacklevel=4,
            )


def _warn_about_tiers(plan: Plan, engine: Engine) -> None:
    for rule in plan.rules.rules:
        if rule.tier is not None and rule.tier.value not in engine.tiers:
            warnings.warn(
                f"lowtide: {_at(rule)}engine '{engine.name}' has no tier '{rule.tier.value}'; these activations go to "
                f"'{engine.tiers[0]}'.",
                stacklevel=4,
            )


def _foreign_hooks_error(hooks: tuple[Callable, Callable]) -> ConfigError:
    name = f"{getattr(hooks[0], '__module__', '?')}.{getattr(hooks[0], '__qualname__', '?')}"
    return ConfigError(
        f"lowtide: the model was called inside other saved-tensor hooks ({name}). PyTorch calls only the innermost "
        "pair, so those would see nothing. Leave them out, enter them around single modules inside the model, or call "
        "tide.remove() first."
    )
