"""A tide: one model under one plan, from `apply` to `remove()`.

What: `apply` finds the layers, checks the rules against the model, and returns a `Tide`, which wraps the model
(wrap.py), shows what happened and can undo everything.

Under several ranks `apply` is collective: the ranks compare their plans, and refuse together.

Not covered: budgets (runtime/autopilot), compiled models, `nn.DataParallel`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Collection, Mapping

import torch
from torch import nn

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Pattern, Rule, Rules
from lowtide.engines.base import Engine
from lowtide.errors import RecomputeRefusedError
from lowtide.loss.attach import AttachedLoss
from lowtide.runtime.hooks.context import PlanContext
from lowtide.runtime.hooks.first_forward import with_bytes_seen
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.spill import Guard
from lowtide.runtime.recompute.fingerprint import Fingerprints, RecipeMismatchError
from lowtide.runtime.recompute.recipe_graph import give_up_recipe, logged_kinds, nodes_of
from lowtide.runtime.saved.stats import Stats
from lowtide.runtime.session.forward_patch import UnobservedForwards
from lowtide.runtime.session.handle import Handle
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.wrap import PlannedForwards, rules_about_ops
from lowtide.tensors.live_bytes import state_tensors, unique_bytes


class Tide(Handle):
    """A model under a plan. A context manager: leaving it removes it. All sizes in bytes, times in seconds."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: torch.optim.Optimizer | None,
        engine: Engine,
        *,
        owns_engine: bool,
        placed: PlacedState | None = None,
        loss: AttachedLoss | None = None,
    ) -> None:
        super().__init__(model, optimizer, engine, placed)
        self._plan = plan
        self._optimizer = optimizer
        self._scheduler = OffloadScheduler(engine)
        if owns_engine:
            # It must outlive every graph that still holds activations: the last of them takes it down. An engine that
            # the caller made is the caller's to close.
            weakref.finalize(self._scheduler, engine.close)
        self._context = self._context_of(plan)
        self._stall_base_seconds = engine.stall_seconds()
        self._unobserved = UnobservedForwards(model, "lowtide.apply")
        try:
            self._forwards = PlannedForwards(plan, self._context, engine, self._unobserved, self)
        except BaseException:
            self._unobserved.close()  # it has hooks on the parameters already
            raise
        self._forwards.check_first(rules_about_ops(model, plan), is_solved=plan.is_solved)
        self._is_removed = False
        self.audited_peak_bytes: int | None = None
        """The peak of the last audit, in bytes; None where there was none."""
        self._loss = loss
        if placed is not None:
            try:
                placed.follow(plan)
            except BaseException:
                self.remove()
                raise

    # -- what the user sees ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, with the sites that the first forward showed. A solved plan stays what it was; the bytes are those
        that were seen, and what it did not know is at its end."""
        seen, plan = self._context.sites, self._plan
        if self.audited_peak_bytes is not None:
            plan = dataclasses.replace(plan, audited_peak_bytes=self.audited_peak_bytes)
        if not plan.is_solved:
            return plan.with_sites(seen.values())
        known = [with_bytes_seen(site, seen.get(site.name)) for site in plan.sites]
        return plan.with_sites([*known, *(seen[name] for name in self._context.unknown_site_bytes)])

    @property
    def failed_recipes(self) -> dict[str, str]:
        """Sites that were to be recomputed and are kept, because their recipe did not hold: name, and why."""
        nodes = (self._context.nodes or {}).values()
        return {node.name: node.why_failed for node in nodes if node.has_failed}

    @property
    def refused_layers(self) -> dict[str, str]:
        """Modules that were to run again and cannot: name, and why. Under a solved plan they are kept from then on."""
        watches = self._context.watches.values()
        return {watch.path(): watch.refusal for watch in watches if watch.refusal}

    @property
    def has_run(self) -> bool:
        """Whether a forward pass has shown what the model saves; the one that does takes longer."""
        return bool(self._context.sites)

    @property
    def stats(self) -> Stats:
        """A snapshot of what happened since `apply` or the last `reset_stats()`."""
        peak_bytes = self.engine.device_peak_bytes()
        if peak_bytes is None:
            peak_bytes = self._model_state_bytes() + self._scheduler.ledger.peak_bytes
        return self._scheduler.counters.totals(
            self.engine,
            peak_bytes=peak_bytes,
            since_seconds=self._stall_base_seconds,
            num_unknown=len(self._context.unknown_site_bytes),
        )

    @property
    def num_misfits(self) -> int:
        """Saved tensors that a solved plan did not expect, or not where they came, and calls of layers that it did not
        expect. Unlike `stats`, cheap."""
        guard = self._context.guard
        num_extra = 0 if guard is None else guard.num_extra_calls
        return self._scheduler.counters.num_divergences + len(self._context.unknown_site_bytes) + num_extra

    def reset_stats(self) -> None:
        """Start all totals, and the peak, anew."""
        self._scheduler.counters.reset()
        self._scheduler.ledger.restart_peak()
        self._stall_base_seconds = self.engine.stall_seconds()
        self.engine.reset_device_peak()

    def set_limit(
        self,
        limit_bytes: int | None,
        *,
        slack_bytes: int | None = None,
        longer_bytes: int | None = None,
        num_calls: Mapping[str, int] | None = None,
    ) -> None:
        """Spill kept activations before live bytes on the device pass this limit; None: no limit. `slack_bytes`: how
        much of what the plan makes again may stay where recipes do not hold; more is spilled. `longer_bytes`: how much
        activations may take in a step that is longer than planned, whatever else the limit says; `num_calls`: how often
        layers run in a step as planned.

        A safety net under a plan, not a plan: see runtime/offload/spill.py. It holds from the next forward pass on.
        """
        assert limit_bytes is None or limit_bytes >= 0
        self._context.guard = None
        if limit_bytes is not None:
            self._context.guard = Guard(
                limit_bytes,
                scheduler=self._scheduler,
                min_bytes=self._plan.min_bytes,
                state_bytes=self._model_state_bytes,
                slack_bytes=slack_bytes,
                longer_bytes=longer_bytes,
                num_calls=num_calls,
            )

    def hold_at_most(self, nbytes: int) -> None:
        """Spill kept activations of forward passes that are over, until they hold no more than this. Not a promise:
        what recipes and second runs start from stays. Only under a limit."""
        if self._context.guard is not None:
            self._context.guard.hold_at_most(nbytes)

    def keep_layers(self, names: Collection[str]) -> None:
        """Keep what these layers save, where the solved plan would run them again: another plan's step has shown that
        they cannot be. A limit (`set_limit`) holds all the same."""
        for name in names:
            watch = self._context.watch(self.model.get_submodule(name))
            watch.refusal = watch.refusal or "It could not be run again in a step of another plan."

    def keep_collectives(self) -> None:
        """Keep what collectives give in recomputed layers (recompute/collectives.py). Before the first forward pass."""
        self._context.keeps_collectives = True

    def _in_force(self) -> Tide:
        return self

    @property
    def _is_over(self) -> bool:
        return self._is_removed

    def suspend(self) -> None:
        """Leave the model as it was until `resume()`, and keep what its forward passes have shown. Idempotent."""
        self._forwards.take_off()

    def resume(self) -> None:
        """Go on after `suspend()`. The model must be as it was then."""
        self._forwards.reapply()

    def remove(self) -> None:
        """Restore the model exactly. Graphs that are still alive keep working. Idempotent.

        Where there is no memory for the optimizer's state, the model is restored all the same; call it again.
        """
        if not self._is_removed:
            self._is_removed = True
            self._unobserved.close()
            self.suspend()
            self._scheduler.close()
            if self._loss is not None:
                self._loss.close()
                self._say_if_no_loss(self._loss)
        if self.placed is not None:
            self.placed.remove()

    def __repr__(self) -> str:
        state = "removed" if self._is_removed else "applied"
        return f"<lowtide.Tide {state}: {len(self._plan.layers)} layers on engine '{self.engine.name}'>"

    def _say_if_no_loss(self, loss: AttachedLoss) -> None:
        if self.has_run and loss.loss is not None and not loss.loss.was_called:
            warnings.warn(
                f"lowtide: memory.loss: nothing was sliced: no forward pass of {type(self.model).__name__} called its "
                "loss_function; give it labels, or call lowtide.cross_entropy in a training loop of your own",
                stacklevel=3,
            )

    def _model_state_bytes(self) -> int:
        """Parameters, buffers, gradients and optimizer state: unique storages on this engine's device."""
        return unique_bytes(state_tensors(self.model, self._optimizer), self.engine.device_type)

    # -- out of memory ---------------------------------------------------------------------------------------------

    def _tighten(self, error: BaseException, num_tried: int) -> str | None:
        if isinstance(error, RecipeMismatchError):
            return self._give_up_recipes(error, num_tried)
        if isinstance(error, RecomputeRefusedError):
            return f"'{error.path}' is kept now"
        has_room = bool(self.engine.tiers) and not self._scheduler.counters.num_kept_for_lack_of_room
        smaller = tighter(self._plan, has_room=has_room)
        if smaller is None:
            return None
        self._forwards.take_off()
        self._plan, how = smaller
        self.audited_peak_bytes = None  # of another plan
        before = self._context
        self._context = self._context_of(self._plan)
        self._context.guard, self._context.slices = before.guard, before.slices
        self._context.keeps_collectives = before.keeps_collectives
        self._forwards = PlannedForwards(self._plan, self._context, self.engine, self._unobserved, self)
        return how

    def _give_up_recipes(self, error: RecipeMismatchError, num_tried: int) -> str:
        """Its own recipe is given up already; where that was not enough, all are."""
        if num_tried == 0:
            return f"'{error.site}' is kept now"
        for node in (self._context.nodes or {}).values():
            node.has_failed = True
        return "all that recipes made is kept now"

    # -- how it works ----------------------------------------------------------------------------------------------

    def _context_of(self, plan: Plan) -> PlanContext:
        nodes = nodes_of(plan, self.model) if plan.is_solved else None
        return PlanContext(
            model=self.model,
            rules=plan.rules,
            min_bytes=plan.min_bytes,
            scheduler=self._scheduler,
            nodes=nodes,
            fingerprints=Fingerprints(functools.partial(give_up_recipe, nodes or {}), is_deep=plan.check == "deep"),
            logged_kinds=logged_kinds(nodes),
        )


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
