"""Which collectives a file means, and what it says of them; on a decoder of round numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile, Site
from lowtide.core.recipe import Recipe, RecipeStep
from lowtide.errors import ConfigError
from lowtide.mindformers.plan import plan_sections, recomputed_collectives, with_own_groups
from lowtide.mindformers.plan_rows import FilePlan, rows_without_step
from lowtide.planner.plan_profile import plan_profile
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, decoder_profile
from tests.support.sections import resolve

GATHER = RecipeStep(op="_c10d_functional.all_gather_into_tensor.default", args=({"input": 0}, 2, "7"))
WAIT = RecipeStep(op="_c10d_functional.wait_tensor.default", args=({"step": 0, "output": 0},))
CAST = RecipeStep(op="aten._to_copy.default", args=({"input": 0},))
SCALE = RecipeStep(op="aten.mul.Tensor", args=({"input": 0}, 2.0))


def gathering(*steps: RecipeStep) -> Profile:
    """Three layers in which a collective makes `attn.sdpa` from `norm.mul`."""
    profile = decoder_profile(3, is_fake=False)
    by_name = {node.name: node for node in profile.nodes}

    def changed(node: Site) -> Site:
        if not node.name.endswith("attn.sdpa"):
            return node
        # `mlp.silu` is made from one node; so is this one.
        like = by_name[node.name.replace("attn.sdpa", "mlp.silu")].recipe
        assert like is not None
        start = dataclasses.replace(like.inputs[0], name=node.name.replace("attn.sdpa", "norm.mul"))
        recipe = dataclasses.replace(like, inputs=(start,), steps=steps)
        return dataclasses.replace(node, recipe=None, why_no_recipe="collective", collective_recipe=recipe)

    return dataclasses.replace(profile, nodes=tuple(map(changed, profile.nodes)))


def written(profile: Profile, recompute: Any = None, swap: Any = None) -> FilePlan:
    return plan_sections(profile, resolve(recompute, swap, num_layers=3))


def of_layer(found: FilePlan, layer: int) -> dict[str, Fate]:
    prefix = f"model.layers.{layer}."
    return {site.name.removeprefix(prefix): site.fate for site in found.plan.sites if site.name.startswith(prefix)}


@pytest.mark.parametrize("steps", [(GATHER, WAIT), (CAST, GATHER, WAIT)], ids=["bare", "cast"])
@pytest.mark.parametrize("part", ["norm", "attn"])
def test_a_collective_is_at_the_op_that_feeds_it_and_at_the_module_that_it_runs_in(part: str, steps: tuple) -> None:
    found = written(gathering(*steps), {"select_comm_recompute": {part: [1]}})
    assert [(row.layer, row.part, row.fate, row.nbytes) for row in found.rows] == [(0, part, "recompute", 16 * MIB)]
    assert found.rows[0].why == f"recompute_config.select_comm_recompute.{part} (its all-gather is recomputed)"
    made = next(site for site in found.plan.sites if site.fate is Fate.RECOMPUTE)
    assert made.name == "model.layers.0.attn.sdpa"
    assert made.recipe is not None and made.recipe.collectives == ("all_gather_into_tensor",)
    assert of_layer(found, 1)["attn.sdpa"] is Fate.KEEP
    assert not found.notes


def test_not_when_something_was_computed_in_between() -> None:
    found = written(gathering(SCALE, GATHER, WAIT), {"select_comm_recompute": {"norm": [1]}})
    assert found.rows == ()
    note = "backward reads no result of a functional collective there"
    assert found.notes == (f"no effect: select_comm_recompute at 'norm' in layer 0: {note}",)


def test_nobody_else_uses_such_a_recipe() -> None:
    profile = gathering(GATHER, WAIT)
    for config in ({"select_recompute": ["attn", "norm"]}, {"recompute": True, "select_recompute_exclude": ["mlp"]}):
        found = written(profile, config)
        assert of_layer(found, 0)["attn.sdpa"] is Fate.KEEP
        assert "cannot be recomputed: collective" in " ".join(row.why for row in found.rows)
    link = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    plan = plan_profile(profile, load_memory({"budget": "1100MiB"}), link=link)
    assert any(site.fate is Fate.RECOMPUTE for site in plan.sites)
    assert not any(site.recipe.collectives for site in plan.sites if site.recipe)


def test_what_the_collective_is_given_stays() -> None:
    swap = {"swap": True, "op_swap": [{"op_name": "norm", "backward_prefetch": 3, "layers": [0, 1]}]}
    config = {"select_comm_recompute": {"norm": [0]}}
    found = written(gathering(GATHER, WAIT), config, swap)
    assert of_layer(found, 0)["norm.mul"] is Fate.KEEP
    assert of_layer(found, 1)["norm.mul"] is Fate.SWAP
    assert "'norm' of layer 0 reads it and is recomputed" in " ".join(row.why for row in found.rows)


def test_what_it_is_given_may_be_made_again_itself() -> None:
    found = written(gathering(GATHER, WAIT), {"select_comm_recompute": ["norm"], "select_recompute": ["norm"]})
    assert of_layer(found, 0)["norm.mul"] is Fate.RECOMPUTE
    assert of_layer(found, 0)["attn.sdpa"] is Fate.RECOMPUTE
    assert of_layer(found, 0)["input"] is Fate.KEEP  # the retained input that the norm starts from
    assert [(row.part, row.nbytes) for row in found.rows[:2]] == [("norm", 32 * MIB), ("norm", 16 * MIB)]


def test_an_exclusion_in_a_recomputed_layer_is_said_to_do_nothing() -> None:
    config = {"recompute": [1], "select_comm_recompute_exclude": ["norm"]}
    note = (
        "no effect: select_comm_recompute_exclude in layer 0: what is recomputed there is the layer, not a collective"
    )
    assert note in written(gathering(GATHER, WAIT), config).notes


def test_without_ranks_nothing_is_known_of_collectives() -> None:
    config = {"select_comm_recompute": {"norm": [2]}}
    found = written(decoder_profile(3), config)
    assert found.notes == (
        "select_comm_recompute at 'norm' in layers 0-1: a step that is traced in one process has no collectives, so "
        "they are not in the table",
    )
    rows = rows_without_step(resolve(config, None, num_layers=3))
    assert [(row.layer, row.fate, row.nbytes) for row in rows] == [(0, "recompute", None), (1, "recompute", None)]
    assert rows[0].why.endswith("(its collectives are recomputed)")


def test_several_collectives_in_words() -> None:
    def node(*names: str) -> Site:
        steps = tuple(RecipeStep(op=f"_c10d_functional.{name}.default", args=("7",)) for name in names)
        recipe = Recipe(inputs=(), steps=steps, seconds=0.0, transient_bytes=0)
        return dataclasses.replace(decoder_profile(1).nodes[0], collective_recipe=recipe)

    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    assert recomputed_collectives([node(gather), node(gather)]) == "its 2 all-gathers are recomputed"
    assert recomputed_collectives([node(gather), node(scatter)]) == "its all-gather and reduce-scatter are recomputed"
    assert node(gather, scatter).collective_recipe.groups == ("7",)


def test_each_rank_has_its_own_names_of_groups() -> None:
    profile = gathering(GATHER, WAIT)
    theirs = gathering(dataclasses.replace(GATHER, args=(*GATHER.args[:-1], "3")), WAIT)
    config = {"select_comm_recompute": ["norm"], "select_recompute": ["mlp"]}
    plan = written(theirs, config).plan
    assert with_own_groups(plan, profile) == written(profile, config).plan
    with pytest.raises(ConfigError) as caught:
        with_own_groups(plan, decoder_profile(3))
    assert str(caught.value) == (
        "recompute_config.select_comm_recompute: the first rank has a collective at 'model.layers.0.attn.sdpa' that "
        "this rank has not; ranks that share a plan must run the same layers"
    )
