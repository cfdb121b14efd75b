"""Codecs as a further way for a site: what the solver makes of them, and one decision for each site."""

from __future__ import annotations

import bisect
import dataclasses

import pytest

from lowtide.cli.diff import plan_diff
from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, Site
from lowtide.core.recipe import Codec
from lowtide.errors import BudgetError
from lowtide.planner.by_rules import HostCosts, problem_of
from lowtide.planner.local_search import Evaluator, improve
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.smaller import form_of, send_ops
from lowtide.report.budget_sweep import sweep_lines
from lowtide.report.played_step import play
from lowtide.timeline.memory import StepArrays, curve, plain_curve
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, SECONDS, decoder_profile
from tests.timeline.steps import needs_of

FAST = Link(out_bytes_per_second=1e15, in_bytes_per_second=1e15)
SLOW = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
SDPA = "model.layers.{}.attn.sdpa"
CODEC = Codec(kind="bits", nbytes=2 * MIB, work_bytes=MIB, seconds=1e-5)
NO_RECIPES = load_memory({"budget": "1GiB", "recompute": "none", "swap": "none"})


def coded(codec: Codec = CODEC, num_layers: int = 4) -> Profile:
    """The decoder, in which the output of attention (16 MiB, no recipe) fits a codec."""
    profile = decoder_profile(num_layers)
    nodes = (
        dataclasses.replace(node, codec=codec) if node.name.endswith("attn.sdpa") else node for node in profile.nodes
    )
    return dataclasses.replace(profile, nodes=tuple(nodes))


def plain_bytes(profile: Profile) -> int:
    return int(plain_curve(problem_of(profile, NO_RECIPES).step).max())


def planned(profile: Profile, less_mib: int, memory: dict | None = None, link: Link = SLOW) -> Plan:
    config = NO_RECIPES if memory is None else load_memory({"budget": "1GiB", **memory})
    return plan_profile(profile, config, link=link, budget_bytes=plain_bytes(profile) - less_mib * MIB)


def test_the_plain_step_is_that_without_codecs() -> None:
    profile = coded()
    with_codecs, without = (problem_of(p, NO_RECIPES).step for p in (profile, profile.without_codecs([SDPA.format(0)])))
    assert plain_curve(with_codecs).max() == plain_curve(without).max()
    assert plain_bytes(profile) == plain_bytes(decoder_profile())


@pytest.mark.parametrize("is_let_go_early", [False, True])
def test_the_lifetimes_of_a_site_that_is_stored_smaller(is_let_go_early: bool) -> None:
    """Worked out by hand: the form comes when the next operator has saved, and is there until the site was made."""
    profile = coded(num_layers=1)
    if is_let_go_early:  # by everything else, before the runtime can encode it
        nodes = (node if node.codec is None else dataclasses.replace(node, dies=node.saved) for node in profile.nodes)
        profile = dataclasses.replace(profile, nodes=tuple(nodes))
    problem = problem_of(profile, NO_RECIPES)
    items = {item.name: (index, item) for index, item in enumerate(problem.step.items)}
    site = next(node for node in profile.nodes if node.name == SDPA.format(0))
    send = dict(zip((node.name for node in profile.nodes), send_ops(profile), strict=True))[site.name]
    plain = [Fate.KEEP] * len(items)
    stored = list(plain)
    stored[items[site.name][0]] = Fate.RECOMPUTE
    change = curve(problem.step, stored) - curve(problem.step, plain)
    for tick, start in enumerate(problem.starts[:-1]):
        expected = 0
        if send <= start < site.reads[0] + 1:
            expected += CODEC.nbytes  # also while the site is made from it
        if send < start < site.reads[0]:
            expected -= site.nbytes
        if start in (send, site.reads[0]):
            expected += CODEC.work_bytes
        assert change[tick] == expected, (tick, start)


def test_a_budget_that_only_codecs_can_keep() -> None:
    plan = planned(coded(), 20)
    stored = [site for site in plan.sites if site.codec is not None]
    assert [site.fate for site in stored] == [Fate.KEEP] * 2
    assert all(site.name.endswith("attn.sdpa") and site.codec == CODEC for site in stored)
    assert all(site.retained_input is None and site.recipe is None for site in plan.sites)
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert plan.predicted.codec_seconds == pytest.approx(2e-5)
    assert plan.predicted.recompute_seconds == pytest.approx(0.0)
    assert not plan.does_nothing
    with pytest.raises(BudgetError):
        planned(decoder_profile(), 20)
    profile = coded()
    drawn = play(plan, profile, NO_RECIPES, link=SLOW)
    assert max(drawn.planned_bytes) == plan.predicted.peak_bytes


def test_a_form_that_is_swapped() -> None:
    """Hosts of little memory take the forms only."""
    memory = {"recompute": "none", "swap": "auto", "host_budget": 8 * MIB, "min_bytes": "1MiB"}
    plan = planned(coded(), 57, memory, FAST)
    swapped = [site for site in plan.sites if site.codec is not None and site.fate is Fate.SWAP]
    assert swapped
    assert all(site.leave is not None and site.prefetch is not None for site in swapped)
    assert sum(site.stored_bytes for site in plan.sites if site.fate is Fate.SWAP) <= 8 * MIB


def test_the_solver_weighs_the_price() -> None:
    for seconds, is_used in ((1e-6, True), (1.0, False)):
        plan = planned(
            coded(dataclasses.replace(CODEC, seconds=seconds)), 20, {"recompute": "none", "swap": "auto"}, SLOW
        )
        assert any(site.codec is not None for site in plan.sites) == is_used
    assert planned(coded(), 0).does_nothing


def test_what_rules_name_stays_as_it_is() -> None:
    kept = {"recompute": "none", "swap": "none", "keep": ["layers.0-2"]}
    plan = planned(coded(), 10, kept)
    assert [site.name for site in plan.sites if site.codec is not None] == [SDPA.format(3)]


MUL = "model.layers.{}.mlp.mul"


def both(codec: Codec, recipe_seconds: float = SECONDS / 20) -> Profile:
    """The decoder, in which `mlp.mul` (56 MiB) fits a codec beside its recipe."""
    profile = decoder_profile(2)

    def with_both(node: Site) -> Site:
        assert node.recipe is not None
        return dataclasses.replace(node, codec=codec, recipe=dataclasses.replace(node.recipe, seconds=recipe_seconds))

    nodes = (with_both(node) if node.name.endswith("mlp.mul") else node for node in profile.nodes)
    return dataclasses.replace(profile, nodes=tuple(nodes))


WAYS = {"recompute": "auto", "swap": "none"}


@pytest.mark.parametrize(
    ("seconds", "recipe_seconds", "nbytes", "less_mib", "is_stored"),
    [
        (1e-5, 1e-3, 2 * MIB, 20, True),  # the cheaper of the two
        (1e-3, 1e-5, 2 * MIB, 20, False),
        (1e-5, 1e-3, 50 * MIB, 20, False),  # cheap, but it frees 6 MiB
        (1e-5, 1e-3, 50 * MIB, 3, True),
    ],
)
def test_a_codec_is_weighed_beside_a_recipe(
    seconds: float, recipe_seconds: float, nbytes: int, less_mib: int, is_stored: bool
) -> None:
    profile = both(dataclasses.replace(CODEC, seconds=seconds, nbytes=nbytes), recipe_seconds)
    only_mul = {**WAYS, "keep": ["layers.*.norm.mul", "layers.*.mlp.silu"]}
    plan = planned(profile, less_mib, only_mul)
    (changed,) = [site for site in plan.sites if site.codec is not None or site.fate is not Fate.KEEP]
    assert changed.name in (MUL.format(0), MUL.format(1))
    assert (changed.codec is not None, changed.recipe is None) == (is_stored, is_stored)
    assert changed.fate is (Fate.KEEP if is_stored else Fate.RECOMPUTE)
    assert changed.cost_seconds == min(seconds, recipe_seconds) if nbytes < 50 * MIB else True
    predicted = plan.predicted
    assert predicted is not None
    parts = (predicted.codec_seconds, predicted.recompute_seconds)
    assert parts == pytest.approx((seconds, 0.0) if is_stored else (0.0, recipe_seconds))
    drawn = play(plan, profile, load_memory({"budget": "1GiB", **only_mul}), link=SLOW)
    assert max(drawn.planned_bytes) == predicted.peak_bytes


def test_rules_without_recipes_leave_codecs() -> None:
    """Even where the recipe would be cheaper."""
    dear = dataclasses.replace(CODEC, seconds=0.1)
    stored = planned(both(dear, 1e-6), 40, {"recompute": "none", "swap": "none"})
    assert [site.name for site in stored.sites if site.codec is not None]
    assert all(site.recipe is None for site in stored.sites)


def test_a_site_that_is_stored_smaller_holds_no_retained_input_and_needs_no_proof() -> None:
    """`norm.mul` has a recipe that starts from a retained input; from its form it needs neither."""
    profile = decoder_profile(2)
    nodes = (
        dataclasses.replace(node, codec=CODEC if node.name.endswith("norm.mul") else None) for node in profile.nodes
    )
    profile = dataclasses.replace(profile, nodes=tuple(nodes), device="cpu")
    only_norms = {**WAYS, "keep": ["layers.*.mlp"]}
    for seconds, is_stored in ((1e-6, True), (1.0, False)):
        codec = dataclasses.replace(CODEC, seconds=seconds)
        nodes = (dataclasses.replace(node, codec=codec if node.codec else None) for node in profile.nodes)
        config = load_memory({"budget": "1GiB", **only_norms})
        plan = plan_profile(
            dataclasses.replace(profile, nodes=tuple(nodes)),
            config,
            link=SLOW,
            budget_bytes=plain_bytes(profile) - 10 * MIB,
            costs=HostCosts(op_seconds=1e-9),
        )
        assert any(site.codec is not None for site in plan.sites) == is_stored
        assert any(site.retained_input is not None for site in plan.sites) != is_stored
        assert plan.predicted is not None
        assert (plan.predicted.check_seconds == 0.0) == is_stored


def test_a_search_goes_over_from_a_recipe_to_the_form_and_back() -> None:
    config = load_memory({"budget": "1GiB", **WAYS, "keep": ["layers.*.norm.mul", "layers.*.mlp.silu"]})
    for seconds, wanted in ((1e-6, Fate.KEEP), (1e-2, Fate.RECOMPUTE)):
        problem = problem_of(both(dataclasses.replace(CODEC, seconds=seconds)), config)
        places = {item.name: index for index, item in enumerate(problem.step.items)}
        fates = [Fate.KEEP] * len(places)
        other = Fate.RECOMPUTE if wanted is Fate.KEEP else Fate.KEEP
        for layer in range(2):
            fates[places[MUL.format(layer)]] = Fate.RECOMPUTE
            fates[places[form_of(MUL.format(layer))]] = other
        evaluator = Evaluator(StepArrays.of(problem.step), SLOW, plain_bytes(both(CODEC)) - 60 * MIB)
        start = evaluator.play(fates)
        assert start.fits
        found = improve(evaluator, start, max_plays=100)
        made = [
            place for name, place in places.items() if found.fates[place] is Fate.RECOMPUTE and "smaller" not in name
        ]
        assert made
        forms = [problem.step.items[place].form for place in made]
        assert {found.fates[form] for form in forms if form is not None} == {wanted}


def test_what_a_recipe_starts_from_need_not_stay_for_a_site_that_is_stored_smaller() -> None:
    """`mlp.mul` by its recipe needs `silu`, which needs `gate`, and `up`, all at once; from its form nothing."""
    problem = problem_of(both(CODEC), load_memory({"budget": "1GiB", **WAYS}))
    items = {item.name: index for index, item in enumerate(problem.step.items)}
    mul = next(node for node in problem.profile.nodes if node.name == MUL.format(0))
    tick = bisect.bisect_right(problem.starts, mul.reads[0]) - 1
    fates = [Fate.KEEP] * len(items)
    for name, fate in ((MUL.format(0), Fate.RECOMPUTE), ("model.layers.0.mlp.silu", Fate.RECOMPUTE)):
        fates[items[name]] = fate
    form = items[form_of(MUL.format(0))]
    needs = []
    for fate in (Fate.KEEP, Fate.RECOMPUTE):
        fates[form] = fate
        needs.append(needs_of(problem.step, fates))
    silu, read = items["model.layers.0.mlp.silu"], items[MUL.format(0)]
    assert (needs[0][form], needs[1][form]) == (tick, None)
    assert (needs[0][read], needs[1][read]) == (tick, tick)
    assert needs[0][silu] > tick  # at its own read
    assert needs[1][silu] == tick


def test_a_site_that_something_else_holds_until_backward_has_no_codec() -> None:
    profile = coded()
    nodes = (
        dataclasses.replace(node, dies=node.reads[0]) if node.codec is not None else node for node in profile.nodes
    )
    held = dataclasses.replace(profile, nodes=tuple(nodes))
    assert all(" smaller" not in item.name for item in problem_of(held, NO_RECIPES).step.items)


def test_the_ladder_and_a_comparison_show_codecs() -> None:
    plan, plain = planned(coded(), 20), planned(coded(), 0)
    assert plan.predicted is not None and plain.predicted is not None
    head, first, second = sweep_lines({2 * MIB: plan.predicted, MIB: plain.predicted}, None)
    assert head.split()[-2:] == ["codecs", "gap"]
    assert (" 20 µs " in first, " 20 µs " in second) == (True, False)
    assert "codecs" not in sweep_lines({MIB: plain.predicted}, None)[0]
    (change,) = {(change["before"], change["after"]) for change in plan_diff(plain, plan)["changes"]}
    assert change == ("keep", "keep as bits")


def test_a_plan_with_codecs_as_text() -> None:
    plan = planned(coded(), 20)
    assert Plan.from_json(plan.to_json()) == plan
    bare = plan.with_sites(dataclasses.replace(site, codec=None) for site in plan.sites)
    assert bare.digest() != plan.digest()
    assert '"codec"' not in bare.to_json()
    assert Plan.from_json(bare.to_json()) == bare
    lines = str(plan).splitlines()
    assert "codecs: 2 sites stored smaller, to the bit: 32.0 MiB in 4.0 MiB, 20 µs a step" in lines
    assert "stored as bits: attn.sdpa" in str(plan)
    assert Profile.from_json(coded().to_json()) == coded()
