"""The optimizer's state where a plan says it is: the way from a plan to `optimizer/`.

What: `PlacedState` attaches the swap of an optimizer's state (optimizer/swap.py) when a plan asks for it, once, and
takes it off again. The plan says which tier, how large buckets are, when they travel and how much stays on the device;
what it leaves open is chosen when the state is seen.
Several plans for one optimizer, as an autopilot has: what stays is the least that any of them has left there. With less
on the device than planned no plan needs more memory, since buckets take no more than the state that has left.
Why an engine of its own: the scheduler of activations calls its engine from autograd's threads under a lock of its own.
The two share what the plan allows on each tier.
Cost: what optimizer/swap.py says. Not covered: state that comes back to stay, where a later plan has room for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Tier
from lowtide.core.plan import Plan
from lowtide.engines.base import Engine
from lowtide.engines.tiers.disk import default_directory
from lowtide.errors import ConfigError
from lowtide.optimizer.buckets import MOST_BYTES
from lowtide.optimizer.requests import check_alone
from lowtide.optimizer.swap import OptimizerSwap, swap_optimizer, why_not


class PlacedState:
    """The state of one optimizer under plans. `call`: the function that the user called, for errors."""

    def __init__(self, optimizer: Any, engine: Engine, call: str) -> None:
        self.optimizer = optimizer
        self.beside = engine
        """The engine of the activations."""
        self._call = call
        self._engine: Engine | None = None
        self.handle: OptimizerSwap | None = None
        """The swap that is in force; None while the state is on the device."""
        self.resident_bytes: int | None = None
        """What plans leave of the state on the device; None while that is all of it."""

    def why_not(self) -> str:
        """Why the state cannot move; empty where it can, and where there is no optimizer."""
        return "" if self.optimizer is None else why_not(self.optimizer)

    def check(self, placement: OptimizerPlacement | None) -> None:
        """Raises `ConfigError` where a plan moves state, and there is no optimizer or one that cannot be swapped."""
        if placement is None or not placement.moves or self.handle is not None:
            return
        refusal = self.why_not()
        if refusal:
            raise ConfigError(refusal)
        if self.optimizer is None:
            raise ConfigError(
                f"memory.optimizer: the state of an optimizer is to be elsewhere between steps, and {self._call} was "
                "given none: pass optimizer=, or write optimizer: keep"
            )
        if placement.overlap == "in_backward":
            check_alone()

    def settle(self) -> None:
        """No copy is under way from here on."""
        if self.handle is not None:
            self.handle.flush()

    def follow(self, plan: Plan) -> None:
        """Move the state if `plan` says so and it is not moved yet, or if more of it stays than `plan` leaves.

        Raises `ConfigError` where the optimizer cannot be stepped in parts.
        """
        placement = plan.optimizer
        if placement is None or not placement.moves:
            return
        total_bytes = (placement.moved_bytes or 0) + placement.resident_bytes
        share = placement.resident_bytes / total_bytes if total_bytes else 0.0
        if self.resident_bytes is None:
            self._attach(plan, placement, share)
        elif placement.resident_bytes < self.resident_bytes:
            assert self.handle is not None
            self.handle.keep_no_more_than(share)
        else:
            return
        self.resident_bytes = placement.resident_bytes

    def _attach(self, plan: Plan, placement: OptimizerPlacement, share: float) -> None:
        """Have the state move for the first time; `share` of it stays."""
        where = plan_of_place(plan, placement)
        self._engine = self.beside.another(where)
        try:
            self.handle = swap_optimizer(
                self.optimizer,
                tier=placement.tier.value,
                overlap=placement.overlap or "auto",
                resident=share,
                # What has to be stepped at once has a bucket of its own in any case.
                bucket_bytes=min(placement.bucket_bytes, MOST_BYTES) if placement.bucket_bytes else "auto",
                engine=self._engine,
                num_buffers=placement.num_slots,
            )
        except BaseException:
            self._engine.close()
            self._engine = None
            raise

    def remove(self) -> None:
        """Bring the state back to the device. Idempotent."""
        if self.handle is not None:
            self.handle.detach()
            self.handle = self.resident_bytes = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def plan_of_place(plan: Plan, placement: OptimizerPlacement) -> Plan:
    """What an engine for the state alone is chosen by: tiers and their limits."""
    path = plan.disk_path or (default_directory() if placement.tier is Tier.DISK else None)
    return dataclasses.replace(
        Plan(layers=(), min_bytes=0),
        disk_path=path,
        host_budget_bytes=plan.host_budget_bytes,
        disk_budget_bytes=plan.disk_budget_bytes,
    )
