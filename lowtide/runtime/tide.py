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
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lowtide.catalog.sharded import local_part
from lowtide.config.native import MemoryConfig
from lowtide.planner.fate import Fate
from lowtide.planner.plan import Plan
from lowtide.planner.rules import Rules, unmatched_error
from lowtide.runtime.anchors import anchor_points
from lowtide.runtime.audit import Audit
from lowtide.runtime.checks import (
    agree_across_ranks,
    check_patterns,
    foreign_hooks_error,
    plan_of,
    recomputed_modules,
    refuse_unsuitable,
    rules_about_ops,
    warn_about_checkpointing,
    warn_about_parts_of_recomputed_layers,
    warn_about_tiers,
)
from lowtide.runtime.engines.base import Engine
from lowtide.runtime.engines.choose import choose_engine
from lowtide.runtime.guard import Guard
from lowtide.runtime.handle import open_handle
from lowtide.runtime.hooks import Scope
from lowtide.runtime.patch import ForwardPatch
from lowtide.runtime.recompute import is_checkpoint_hook, top_hooks
from lowtide.runtime.rollback import Rollback, tighter
from lowtide.runtime.sites_seen import warn_about_other_sites, with_bytes_seen
from lowtide.runtime.slices import Slices
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
    group: Any = None,
) -> Tide:
    """Carry out `memory` on `model` until `tide.remove()`. See `lowtide.apply`."""
    refuse_unsuitable(model)
    plan = plan_of(model, memory)
    check_patterns(model, plan)
    agree_across_ranks(plan, group)
    warn_about_checkpointing(model)
    warn_about_parts_of_recomputed_layers(model, plan)
    chosen = choose_engine(engine, model, plan)
    warn_about_tiers(plan, chosen)
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
        self._slices: Slices | None = None
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
        self._unchecked = rules_about_ops(model, plan)
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

    def slice_inputs(self, slices: Slices) -> None:
        """Keep a slice of each recomputed layer's input on this tensor-parallel rank. Before the first forward pass."""
        self._slices = self._setting.slices = slices

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

    def outlive(self, lease: object) -> None:
        """Hold `lease` for as long as any graph of this tide lives, also after `remove`."""
        self._mover.lease = lease

    def settle(self) -> None:
        """Wait until no copy is under way, and give back what dead graphs owned. Not needed for correctness."""
        self._mover.settle()

    def suspend(self) -> None:
        """Leave the model as it was until `resume()`, and keep what was learned about it. Idempotent."""
        for patch in reversed(self._patches):
            patch.undo()

    def resume(self) -> None:
        """Go on after `suspend()`. The model must be as it was then."""
        self._patches = [patch.again() for patch in self._patches]

    def remove(self) -> None:
        """Restore the model exactly. Graphs that are still alive keep working. Idempotent."""
        if self._is_removed:
            return
        self._is_removed = True
        self.suspend()
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
        parts = [local_part(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in parts
            if tensor.layout is torch.strided and tensor.device.type == self.engine.device_type
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
            stay_rules=plan.rules.without_recompute(),
            min_bytes=plan.min_bytes,
            device_type=self.engine.device_type,
            mover=self._mover,
            counters=self._counters,
            ledger=self._ledger,
            nodes=nodes_of(plan, self.model) if plan.is_solved else None,
            guard=self._guard,
            slices=self._slices,
        )

    def _wrap(self) -> list[ForwardPatch]:
        modules = dict(self.model.named_modules())
        layers = self._plan.layers
        patches = []
        # Innermost: an anchor of a layer, or of the model, is caught inside its region.
        for points in anchor_points((self._setting.nodes or {}).values(), modules):
            patches.append(ForwardPatch(modules[points.name], points.around(self._open)))
        for name in recomputed_modules(modules, self._plan):
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
            raise foreign_hooks_error(hooks)
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
