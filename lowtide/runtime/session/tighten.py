"""Tighter plans, for the next try after an out-of-memory."""

from __future__ import annotations

import dataclasses

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Pattern, Rule, Rules


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
