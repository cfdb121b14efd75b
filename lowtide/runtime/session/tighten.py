"""When memory ran out: a tighter plan for the next try; and in words, what the plan had said, what most of it was, and
the one change that would mend that.

Where it was the loss or a temporary that asked last does not matter: what is most is what has to be less.
Not covered: words for plans by rules, which predict nothing; memory of others on the device.
"""

from __future__ import annotations

import dataclasses

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Pattern, Rule, Rules
from lowtide.units import format_bytes

_CHANGES = {
    "weights": "share the parameters among ranks (FSDP2), or hold them in bf16",
    "gradients": "share the parameters among ranks (FSDP2), or hold them in bf16",
    "optimizer state": "write memory.optimizer: swap",
    "buffers and batch": "use a smaller micro-batch",
    "activations": "write a lower budget: the plan keeps all that fits this one",
    "head, loss, temporaries": "use a smaller micro-batch",
}


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


def plan_words(plan: Plan) -> str:
    """Two sentences, after a blank; nothing for a plan that predicts nothing."""
    parts = [line for line in plan.account if line.what in _CHANGES]
    if plan.predicted is None or not parts:
        return ""
    most = max(parts, key=lambda line: line.planned_bytes)
    budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
    return (
        f" The plan had said: peak {format_bytes(plan.predicted.peak_bytes)}{budget}, of which {most.what}: "
        f"{format_bytes(most.planned_bytes)}. What would help most: {_CHANGES[most.what]}."
    )
