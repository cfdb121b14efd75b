"""Plans as data: round trips, digests, and the exact table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config.memory import load_memory, plan_from_rules
from lowtide.core.decisions import OptimizerPlacement, SiteDecision
from lowtide.core.fate import Fate, Tier
from lowtide.core.plan import Plan
from lowtide.core.rules import Pattern, Rule, Rules
from lowtide.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
LAYERS = [f"model.layers.{index}" for index in range(8)]
MEMORY = {
    "recompute": ["layers.0-1"],
    "swap": ["layers.*.mlp", {"match": "layers.6", "prefetch": 2, "tier": "disk"}],
    "keep": ["layers.7"],
    "host_budget": "96GiB",
    "disk_path": "/scratch",
}


def small_plan() -> Plan:
    return plan_from_rules(load_memory(MEMORY), LAYERS)


def observed_plan() -> Plan:
    plan = small_plan()
    sites = []
    for layer in LAYERS:
        for op, nbytes in (("norm.mul", 32 << 20), ("mlp.silu", 56 << 20), ("mlp.mul", 56 << 20)):
            name = f"{layer}.{op}"
            decision = plan.rules.decide(name)
            sites.append(
                SiteDecision(
                    name=name,
                    layer=layer,
                    nbytes=nbytes,
                    dtype="bfloat16",
                    fate=decision.fate,
                    tier=decision.tier,
                    prefetch=decision.prefetch,
                    reason=decision.reason,
                )
            )
    outside = plan.rules.decide("lm_head.mm")
    sites.append(
        SiteDecision(
            name="lm_head.mm", layer=None, nbytes=3 << 29, dtype="float32", fate=outside.fate, reason=outside.reason
        )
    )
    return plan.with_sites(sites)


@pytest.mark.parametrize("make", [small_plan, observed_plan])
def test_round_trip(make) -> None:
    plan = make()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@pytest.mark.parametrize("make", [small_plan, observed_plan])
def test_golden_json(make) -> None:
    assert make().to_json() == (GOLDEN / f"{make.__name__}.json").read_text()


@pytest.mark.parametrize("make", [small_plan, observed_plan])
def test_golden_table(make) -> None:
    assert str(make()) + "\n" == (GOLDEN / f"{make.__name__}.txt").read_text()


def test_a_plan_that_does_nothing_says_so() -> None:
    plan = plan_from_rules(load_memory({}), LAYERS)
    assert plan.does_nothing
    assert str(plan).splitlines()[1] == "This plan does nothing: every activation is kept."
    assert not small_plan().does_nothing
    assert "does nothing" not in str(observed_plan())
    kept = [dataclasses.replace(site, fate=Fate.KEEP) for site in observed_plan().sites]
    assert "This plan does nothing" in str(small_plan().with_sites(kept))


def test_only_equal_neighbours_are_folded() -> None:
    sites = [
        SiteDecision(
            name=f"h.{index}.mul", layer=f"h.{index}", nbytes=nbytes, dtype="float32", fate=Fate.KEEP, reason=""
        )
        for index, nbytes in enumerate([1 << 30, 1 << 30, 2 << 30, 1 << 30])
    ]
    plan = Plan(layers=("h.0", "h.1", "h.2", "h.3"), min_bytes=1).with_sites(sites)
    labels = [line.split("  ")[0] for line in str(plan).splitlines()[4:]]
    assert labels == ["layers 0-1", "layer 2", "layer 3", "total"]
    mixed = Plan(layers=("enc.0", "enc.1", "dec.0", "head"), min_bytes=1)
    assert [line.split("  ")[0] for line in str(mixed).splitlines()[4:]] == ["enc.0-1", "dec.0", "head"]


def test_the_digest_is_about_what_ranks_agree_on() -> None:
    plan = small_plan()
    assert len(plan.digest()) == 12
    assert plan.digest() == observed_plan().digest()
    assert plan.digest() == dataclasses.replace(plan, host_budget_bytes=1, disk_path="/other").digest()
    elsewhere = Rules(tuple(dataclasses.replace(rule, where="other.yaml:1:1") for rule in plan.rules.rules))
    assert plan.digest() == dataclasses.replace(plan, rules=elsewhere).digest()
    assert plan.digest() != dataclasses.replace(plan, min_bytes=2).digest()
    assert plan.digest() != dataclasses.replace(plan, layers=plan.layers[1:]).digest()
    assert plan.digest() != dataclasses.replace(plan, rules=Rules(plan.rules.rules[1:])).digest()


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(observed_plan().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{",
            "plan:1:2: not valid JSON: Expecting property name enclosed in double quotes; write one: lowtide plan "
            "RUN.yaml --out plan.json",
        ),
        ("[]", "plan: this is no plan of lowtide; write one: lowtide plan RUN.yaml --out plan.json"),
        (edited(schema=3), "plan: schema 3 is not supported by this version; write the plan again (schema 2)"),
        ('{"schema": 2}', "plan: missing key 'layers'; write the plan again"),
        (
            edited(sites=[{"name": "a", "layer": None, "nbytes": 1, "dtype": "", "fate": "hold", "reason": ""}]),
            "plan: sites[0].fate: expected keep, swap or recompute, not 'hold'; write the plan again",
        ),
    ],
)
def test_from_json_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(text)
    assert str(caught.value) == message


def test_from_json_refuses_an_edited_rule() -> None:
    digest = observed_plan().digest()
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(edited(min_bytes=3))
    assert str(caught.value) == f"plan: the digest {digest} does not fit the rules and layers; write the plan again"


_LETTERS = "aZ0 .,\"'\\/\n\r\t\x00\x7f\x85\xe9\u202e\u2028\u6f22\ufffe\U0001f600\U0010ffff"
"""What JSON escapes, what ends a line, and one of each length in UTF-8: hypothesis takes two seconds to list all there
are."""
PATTERNS = st.sampled_from(["*", "layers.0-15", "layers.*.mlp", "mul", "h.0,2,5-7"]).map(Pattern.parse)
TIERS = st.sampled_from([None, Tier.HOST, Tier.DISK])
SIZES = st.integers(min_value=0, max_value=1 << 50)
RULES = st.builds(
    Rule,
    pattern=PATTERNS,
    fate=st.sampled_from(Fate),
    prefetch=st.none() | st.integers(0, 9),
    tier=TIERS,
    where=st.text(_LETTERS),
)
SITES = st.builds(
    SiteDecision,
    name=st.text(_LETTERS, min_size=1),
    layer=st.none() | st.sampled_from(["layers.0", "layers.1", "elsewhere"]),
    nbytes=SIZES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    fate=st.sampled_from(Fate),
    tier=TIERS,
    prefetch=st.none() | st.integers(0, 9),
    reason=st.text(_LETTERS),
)
PLANS = st.builds(
    Plan,
    layers=st.sampled_from([(), ("layers.0",), ("layers.0", "layers.1"), ("a", "b.1", "b.2")]),
    rules=st.lists(RULES, max_size=4).map(tuple).map(Rules),
    min_bytes=SIZES,
    host_budget_bytes=st.none() | SIZES,
    disk_budget_bytes=st.none() | SIZES,
    disk_path=st.none() | st.text(_LETTERS),
    sites=st.lists(SITES, max_size=5).map(tuple),
)


@given(PLANS)
def test_any_plan_survives_json_and_can_be_printed(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.digest() in str(plan)


# -- the optimizer's state ---------------------------------------------------------------------------------------------

MOVED = OptimizerPlacement(
    moved_bytes=3 << 30, resident_bytes=1 << 30, beside_bytes=2 << 30, tier=Tier.HOST, bucket_bytes=128 << 20,
    overlap="backward", exposed_seconds=0.02, slowed_seconds=0.0015, free_from_tokens=21304, reason="it is asked for",
)  # fmt: skip


def test_a_placement_survives_json() -> None:
    plan = dataclasses.replace(observed_plan(), optimizer=MOVED)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_from_before_placements_still_loads() -> None:
    document = json.loads(observed_plan().to_json())
    assert document.pop("optimizer") is None
    assert Plan.from_json(json.dumps(document)) == observed_plan()
    solved = json.loads((GOLDEN / "solved_plan.json").read_text(encoding="utf-8"))
    assert "optimizer" not in solved and Plan.from_json(json.dumps(solved)).optimizer is None


def test_ranks_agree_on_when_state_travels_and_not_on_how_much() -> None:
    plan = observed_plan()
    stays = dataclasses.replace(plan, optimizer=OptimizerPlacement(moved_bytes=0, reason="everything fits"))
    moved = dataclasses.replace(plan, optimizer=MOVED)
    less = dataclasses.replace(plan, optimizer=dataclasses.replace(MOVED, moved_bytes=1 << 30))
    assert plan.digest() == stays.digest() != moved.digest() == less.digest()
    nothing = dataclasses.replace(small_plan(), rules=Rules())
    assert nothing.does_nothing and not dataclasses.replace(nothing, optimizer=MOVED).does_nothing
