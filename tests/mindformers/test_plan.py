"""Fates by name on a decoder of round numbers: what is made, moved and kept, and what the table says of it."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.config.memory import MemoryConfig
from lowtide.core.fate import Fate
from lowtide.mindformers.plan import names_of_layers, plan_sections
from lowtide.mindformers.plan_rows import FilePlan, layer_sums, rows_without_step, table
from tests.support.profiles import MIB, decoder_profile
from tests.support.sections import resolve


def written(recompute: Any = None, swap: Any = None, memory: MemoryConfig | None = None) -> FilePlan:
    resolution = resolve(recompute, swap, num_layers=3)
    return plan_sections(decoder_profile(3), resolution, memory)


def fates(found: FilePlan, layer: int) -> dict[str, Fate]:
    prefix = f"model.layers.{layer}."
    return {site.name.removeprefix(prefix): site.fate for site in found.plan.sites if site.name.startswith(prefix)}


def swap(*entries: tuple[str, int, list[int]]) -> dict[str, Any]:
    listed = [{"op_name": name, "backward_prefetch": prefetch, "layers": layers} for name, prefetch, layers in entries]
    return {"swap": True, "op_swap": listed}


def test_a_recomputed_op_has_its_recipe_and_its_retained_input() -> None:
    found = written({"select_recompute": {r"norm\.mul": [1]}})
    assert {name: fate for name, fate in fates(found, 0).items() if fate is not Fate.KEEP} == {
        "norm.mul": Fate.RECOMPUTE
    }
    assert "input" in fates(found, 0)  # the retained input that the norm is made from
    assert "input" not in fates(found, 1)
    made = next(site for site in found.plan.sites if site.fate is Fate.RECOMPUTE)
    assert made.recipe is not None
    assert made.reason == r"recompute_config.select_recompute.norm\.mul"


def test_without_a_recipe_it_is_kept_and_said() -> None:
    found = written({"select_recompute": [r"attn\.sdpa"]})
    assert fates(found, 0)["attn.sdpa"] is Fate.KEEP
    assert "cannot be recomputed" in found.rows[0].why
    assert (found.rows[0].fate, found.rows[0].nbytes) == ("keep", 0)


def test_a_module_is_everything_in_it_and_the_later_rule_decides() -> None:
    found = written(None, swap(("mlp", 7, [1]), (r"mlp\.up", 3, [1])))
    swapped = {site.name: site.prefetch for site in found.plan.sites if site.fate is Fate.SWAP}
    assert swapped == {
        "model.layers.1.mlp.gate.mm": 7,
        "model.layers.1.mlp.up.mm": 3,
        "model.layers.1.mlp.silu": 7,
        "model.layers.1.mlp.mul": 7,
    }
    assert layer_sums(found.rows) == {1: (4 * 56 * MIB, 0)}


def test_what_is_read_by_something_recomputed_stays() -> None:
    found = written({"select_recompute": {r"mlp\.mul": [0]}}, swap((r"mlp\.up", 3, [0, 1]), (r"mlp\.gate", 3, [0])))
    assert fates(found, 0)["mlp.up.mm"] is Fate.KEEP
    assert fates(found, 1)["mlp.up.mm"] is Fate.SWAP
    assert fates(found, 0)["mlp.gate.mm"] is Fate.SWAP  # silu reads it, and that one is not recomputed
    assert "'mlp.mul' of layer 0 reads it and is recomputed" in table(found.rows)[2]


def test_recompute_wins_over_a_swapped_layer() -> None:
    config = {"swap": True, "layer_swap": [{"backward_prefetch": 4, "layers": [1]}]}
    found = written({"select_recompute": {r"mlp\.mul": [1]}}, config)
    assert fates(found, 1) == {
        "norm.mul": Fate.SWAP,
        "attn.sdpa": Fate.SWAP,
        "mlp.gate.mm": Fate.SWAP,
        "mlp.up.mm": Fate.KEEP,
        "mlp.silu": Fate.KEEP,
        "mlp.mul": Fate.RECOMPUTE,
    }


def test_a_whole_layer_goes_by_a_rule() -> None:
    found = written({"recompute": [2]})
    assert [(str(rule.pattern), rule.fate) for rule in found.plan.rules.rules] == [
        ("model.layers.0", Fate.RECOMPUTE),
        ("model.layers.1", Fate.RECOMPUTE),
    ]
    assert not any(site.recipe for site in found.plan.sites)
    assert [row.part for row in found.rows] == ["<layer>", "<layer>"]


def test_small_storages_are_kept_if_the_memory_section_says_so() -> None:
    found = written(None, swap((r"attn\.sdpa", 3, [0])), MemoryConfig(min_bytes=32 * MIB))
    assert fates(found, 0)["attn.sdpa"] is Fate.KEEP


@pytest.mark.parametrize(("prefetch", "is_early"), [(1, False), (10_000, True)])
def test_a_distance_past_the_start_of_backward(prefetch: int, *, is_early: bool) -> None:
    found = written(None, swap((r"attn\.sdpa", prefetch, [0, 2])))
    note = (
        "backward_prefetch 10000 reaches past the start of backward in layers 0, 2: fetched as early as possible there"
    )
    assert found.notes == ((note,) if is_early else ())


def test_without_a_step_there_are_names_but_no_bytes() -> None:
    resolution = resolve({"recompute": [0]}, swap(("mlp", 2, [0, 1])), num_layers=2)
    rows = rows_without_step(resolution)
    assert table(rows) == [
        "layer  op       fate              why",
        "0      <layer>  recompute         recompute_config.recompute",
        "0      mlp      keep              not swapped: the whole layer is recomputed",
        "1      mlp      swap, prefetch 2  swap_config.op_swap[0]",
    ]
    assert layer_sums(rows) == {}


def test_names_of_layers() -> None:
    names = ["h.0", "h.0.mlp", "h.0.mlp.act", "h.10", "h.10.attn", "h.1", "norm"]
    assert names_of_layers(names, ["h.0", "h.1", "h.10"]) == [{"mlp": {"act": {}}}, {}, {"attn": {}}]
