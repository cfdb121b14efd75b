"""`recompute_config` and `swap_config` on the stages of a pipeline: which layers a stage holds, and the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Sections
from tests.mindformers.pipeline_rank import (
    NUM_LAYERS,
    NUM_MICRO_BATCHES,
    NUM_STAGES,
    NUM_STEPS,
    TOKENS,
    VOCABULARY,
    Stage,
    loss_of,
    stages_of,
)
from tests.mindformers.test_follow import PARTS, drawn
from tests.support import two_ranks
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual

ROOT = Path(__file__).parents[2]
HALF = NUM_LAYERS // NUM_STAGES
FILE = """\
model: {model_config: {num_layers: 8}}
parallel_config: {pipeline_stage: 2}
recompute_config:
  recompute: [1, 2]
"""


def both_stages(*, numbered: bool = False) -> list[Stage]:
    return [stage for rank in range(NUM_STAGES) for stage in stages_of(rank, 1, numbered=numbered).values()]


def train(stages: list[Stage]) -> list[torch.Tensor]:
    """Two steps as 1F1B runs them, without the sending: the first stage is always one micro-batch ahead."""
    found: list[torch.Tensor] = []
    first, second = stages
    for seed in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(seed)
        batches = torch.randint(0, VOCABULARY, (NUM_MICRO_BATCHES, 2, TOKENS), generator=generator)
        ahead = first(batches[0])
        for index, tokens in enumerate(batches):
            sent, ahead = ahead, first(batches[index + 1]) if index + 1 < NUM_MICRO_BATCHES else ahead
            received = sent.detach().requires_grad_()
            loss = loss_of(second(received), tokens)
            loss.backward()
            sent.backward(received.grad)
            found.append(loss.detach())
        for stage in stages:
            found += [parameter.grad.clone() for parameter in stage.parameters()]
            stage.zero_grad()
    return found


@functools.cache
def plain() -> list[torch.Tensor]:
    return train(both_stages())


def on_stages(config: Any, stages: list[Stage], **how: Any) -> list[Any]:
    return [
        lowtide.apply(stage, config, engine=virtual(index), first_layer=index * HALF, **how)
        for index, stage in enumerate(stages)
    ]


def test_a_file_for_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)
    tides = on_stages("run.yaml", stages := both_stages())
    assert all(torch.equal(a, b) for a, b in zip(train(stages), plain(), strict=True))
    recomputed = [row.layer for tide in tides for row in tide.source.file_plan.rows if row.fate == "recompute"]
    assert recomputed == [0, 4, 5]
    assert tides[1].source.resolution.log_lines[-2:] == [
        "Set full recompute at layer 4",
        "Set full recompute at layer 5",
    ]
    for tide in tides:
        tide.remove()


def test_layers_under_the_numbers_of_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)
    stages = both_stages(numbered=True)
    tides = [lowtide.apply(stage, "run.yaml", engine=virtual(3)) for stage in stages]
    assert [[layer.index for layer in tide.source.resolution.layers] for tide in tides] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(torch.equal(a, b) for a, b in zip(train(stages), plain(), strict=True))
    for tide in tides:
        tide.remove()


@pytest.mark.parametrize("seed", one_of(6, range(6)))
def test_the_same_bits_whatever_is_mixed(seed: int) -> None:
    config = drawn(seed)
    shift = [index + HALF for index in range(HALF)]  # `drawn` speaks of four layers; here the other four do the same
    for entry in [*config["swap_config"]["op_swap"], *config["swap_config"].get("layer_swap", ())]:
        entry["layers"] = entry["layers"] + [shift[index] for index in entry["layers"]]
    assert {entry["op_name"] for entry in config["swap_config"]["op_swap"]} <= set(PARTS)
    sections = Sections(written=config, num_layers=NUM_LAYERS, pipeline_stage=NUM_STAGES)
    tides = on_stages(sections, stages := both_stages())
    assert all(torch.equal(a, b) for a, b in zip(train(stages), plain(), strict=True))
    for tide in tides:
        swapped = sum(row.nbytes for row in tide.source.file_plan.rows if row.fate == "swap")
        assert tide.stats.swapped_bytes == NUM_STEPS * NUM_MICRO_BATCHES * swapped > 0
        assert tide.stats.num_divergences == 0
        tide.remove()


def test_the_newer_schema_on_stages() -> None:
    newer = {
        "recompute": {"mode": "select", "full_recompute_layer": ["1", "6"], "select_module": {"mlp": ["0", "4-5"]}},
        "swap": {"enable": True, "default_prefetch": 1, "layer_swap": [{"layers": ["2-4"]}]},
    }
    tides = on_stages(Sections(written=newer, num_layers=NUM_LAYERS), stages := both_stages())
    assert all(torch.equal(a, b) for a, b in zip(train(stages), plain(), strict=True))
    done = [{(row.layer, row.fate) for row in tide.source.file_plan.rows if row.nbytes} for tide in tides]
    assert done == [
        {(0, "recompute"), (1, "recompute"), (2, "swap"), (3, "swap")},
        {(4, "recompute"), (4, "swap"), (5, "recompute"), (6, "recompute")},
    ]
    for tide in tides:
        tide.remove()


@pytest.mark.parametrize(
    ("first_layer", "message"),
    [
        (
            None,
            "run.yaml: says 8 layers, but the model has 4; of a stage of a pipeline say where it begins: "
            "first_layer=...",
        ),
        (5, "run.yaml: says 8 layers, 0 to 7, but this module of 4 would hold layers 5-8"),
        (-1, "run.yaml: says 8 layers, 0 to 7, but this module of 4 would hold layers -1-2"),
    ],
)
def test_a_stage_that_does_not_fit(
    first_layer: int | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(both_stages()[0], "run.yaml", first_layer=first_layer)
    assert str(caught.value) == message


def test_first_layer_needs_a_file_that_counts() -> None:
    stage = both_stages()[0]
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(stage, {"recompute_config": {"recompute": True}}, first_layer=0)
    assert str(caught.value) == (
        "the sections: does not say how many layers the whole model has; with first_layer it must (model.num_layers)"
    )
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(stage, {"recompute": "all"}, first_layer=0)
    assert str(caught.value) == (
        "lowtide.apply: first_layer goes with a file that has recompute_config or swap_config only"
    )


def test_another_split_than_the_file_says_is_said() -> None:
    sections = Sections(written={"recompute_config": {"recompute": [1, 2]}}, num_layers=NUM_LAYERS, pipeline_stage=4)
    with lowtide.apply(both_stages()[1], sections, first_layer=4) as tide:
        assert tide.source.resolution.notes == [
            "this module holds layers 4-7, but by the file stage 2 of chunk 0 holds layers 4-5; counts are read by the "
            "file"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("is_more", one_of(2, [False, True]))
def test_two_ranks_and_the_schedules_of_torch(is_more: bool, tmp_path: Path) -> None:
    jobs: list[two_ranks.Job] = [("all_schedules", {"is_more": is_more})]
    runs = two_ranks.run("tests.mindformers.pipeline_rank", jobs, tmp_path)[0]
    for rank, of_rank in enumerate(runs):
        assert len(of_rank) == (13 if is_more else 4)
        for name, run in of_rank.items():
            assert run["compared"] > 70, name
            assert run["different"] == 0, name
            assert run["num_divergences"] == 0, name
            swapped = sum(nbytes for _, _, fate, nbytes in run["rows"] if fate == "swap")
            # Once more than there are micro-batches: torch's schedule tries each stage to learn its shapes.
            assert run["num_forwards"] == NUM_STEPS * NUM_MICRO_BATCHES + 1, name
            assert run["swapped_bytes"] == run["num_forwards"] * swapped, name
            assert run["swapped_bytes"] + run["recomputed_bytes"] > 0, name
            if "chunks" not in name:
                assert {row[0] for row in run["rows"]} <= set(range(rank * HALF, (rank + 1) * HALF)), name

    def recomputed(name: str) -> list[list[int]]:
        return [[row[0] for row in run[name]["rows"] if row[1] == "<layer>"] for run in runs]

    assert recomputed("counts per stage, Schedule1F1B") == [[0], [4, 5]]
    assert recomputed("counts per stage, two chunks") == [[0], [2, 6]]
    assert recomputed("a table for chunks, two chunks") == [[0], [6, 7]]
