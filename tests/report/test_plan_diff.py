"""Two plans side by side: figures, rules, and runs of layers whose activations have another fate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lowtide.cli.diff import diff_lines, plan_diff
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan

GOLDEN = Path(__file__).parents[1] / "core" / "golden"
SOLVED = Plan.from_json((GOLDEN / "solved_plan.json").read_text(encoding="utf-8"))


def _with(plan: Plan, fates: dict[str, Fate | None]) -> Plan:
    """With other fates, and without the sites whose fate is None."""
    sites = [
        dataclasses.replace(site, fate=fate, recipe=None, tier=None, prefetch=None, leave=None)
        if (fate := fates.get(site.name, site.fate)) is not site.fate and fate is not None
        else site
        for site in plan.sites
        if fates.get(site.name, site.fate) is not None
    ]
    return plan.with_sites(sites)


def test_a_plan_and_itself() -> None:
    diff = plan_diff(SOLVED, SOLVED)
    assert diff["is_same"]
    assert all(figure["first"] == figure["second"] for figure in diff["figures"])
    assert diff_lines(diff, "a", "b")[-2:] == ["", f"the same fates: all {len(SOLVED.sites)} sites"]


def test_neighbouring_layers_make_one_row() -> None:
    names = {f"model.layers.{layer}.mlp.gate.mm": Fate.KEEP for layer in (0, 1, 2, 4)}
    other = _with(SOLVED, {**names, "model.layers.3.norm.mul": None})
    diff = plan_diff(SOLVED, other)
    assert not diff["is_same"]
    lines = diff_lines(diff, "a.json", "b.json")
    start = next(number for number, line in enumerate(lines) if line.startswith("other fates"))
    assert lines[start:] == [
        "other fates: 5 sites  sites      bytes  which",
        "swap -> keep              3  168.0 MiB  layers 0-2: mlp.gate.mm",
        "swap -> keep              1   56.0 MiB  layer 4: mlp.gate.mm",
        "recompute -> absent       1   32.0 MiB  layer 3: norm.mul",
    ]
    kept = next(figure for figure in diff["figures"] if figure["what"] == "kept")
    assert tuple(kept.values())[1:] == ("488.0 MiB", "712.0 MiB", "+224.0 MiB")


def test_rules_and_promises() -> None:
    observed = Plan.from_json((GOLDEN / "observed_plan.json").read_text(encoding="utf-8"))
    diff = plan_diff(observed, SOLVED)
    assert diff["rules_new"] == ["keep 'layers.7.mlp'"]
    assert "swap 'layers.6'" in diff["rules_gone"]
    step = next(figure for figure in diff["figures"] if figure["what"] == "step")
    assert tuple(step.values())[1:] == ("-", "148.6 ms", "")


FATES = st.lists(st.sampled_from(list(Fate)), min_size=1, max_size=6)


@given(before=FATES, after=FATES)
def test_each_site_that_changed_is_in_one_row(before: list[Fate], after: list[Fate]) -> None:
    def plan(fates: list[Fate]) -> Plan:
        sites = [
            SiteDecision(name=f"h.{n}.x", layer=f"h.{n}", nbytes=1 << n, dtype="float32", fate=fate, reason="drawn")
            for n, fate in enumerate(fates)
        ]
        return Plan(layers=tuple(f"h.{n}" for n in range(len(fates))), min_bytes=0, sites=tuple(sites), is_solved=True)

    diff = plan_diff(plan(before), plan(after))
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a is not b]
    assert sum(change["num_sites"] for change in diff["changes"]) == len(pairs) + abs(len(before) - len(after))
    changed = [n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a is not b]
    changed += range(min(len(before), len(after)), max(len(before), len(after)))
    assert sum(change["nbytes"] for change in diff["changes"]) == sum(1 << n for n in changed)
    assert diff["is_same"] == (before == after)
