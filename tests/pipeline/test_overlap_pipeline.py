"""Pairs of a pipeline that hide their exchanges: on two ranks, with the bits of one process."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.pipeline import Overlap, Pipeline, WeightGradients, fit_stages, linear
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import Schedule, from_csv
from tests.support import two_ranks

CASES: dict[str, dict[str, Any]] = {
    "dualpipev": {"schedule": "dualpipev"},
    "recompute": {"schedule": "dualpipev", "memory": {"recompute": "all"}},
    "swap": {"schedule": "dualpipev", "memory": {"swap": "all", "min_bytes": 0}},
    "none kept": {"schedule": "interleaved_overlap", "most_kept": 0, "memory": {"recompute": "all"}},
    "one kept, cast, no pairs": {"schedule": "1f1b", "most_kept": 1, "change": "partly autocast"},
    "two kept, checkpoints": {"schedule": "dualpipev", "most_kept": 2, "change": "checkpoint"},
}


SPLIT: dict[str, dict[str, Any]] = {
    "four parts, recompute": {"implementation": "grouped_mm", "num_parts": 4, "memory": {"recompute": ["mlp"]}},
    "two parts, recompute, swap": {
        "implementation": "eager",
        "num_parts": 2,
        "memory": {"recompute": ["mlp.experts"], "swap": ["mlp"], "min_bytes": 0},
    },
}


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[Any, Any]]:
    jobs = [("pipeline", arguments) for arguments in CASES.values()]
    jobs += [("split_blocks", arguments) for arguments in SPLIT.values()]
    with tempfile.TemporaryDirectory() as folder:
        return dict(
            zip([*CASES, *SPLIT], two_ranks.run("tests.pipeline.overlap_jobs", jobs, Path(folder)), strict=True)
        )


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_with_overlap_has_the_bits_of_one_process(answers: dict[str, tuple[Any, Any]], name: str) -> None:
    for rank in answers[name]:
        assert rank["different"] == [[], []]
        # Every exchange of a pair is hidden, and none of the others.
        assert rank["num_exposed"] == rank["num_alone"] > 0
        assert rank["num_issues"] > rank["num_alone"] or "no pairs" in name
        # Weight gradients hide every second exchange of a backward alone, and more where some are kept.
        assert 4 * rank["num_filled"] >= (rank["num_alone"] if "kept" in name else 0)


@pytest.mark.parametrize("name", SPLIT)
def test_parts_of_experts_and_shared_ones_hide_exchanges_with_the_bits_of_one_process(
    answers: dict[str, tuple[Any, Any]], name: str
) -> None:
    for rank in answers[name]:
        assert rank["different"] == []
        assert rank["num_filled"] > 0 < rank["num"]


class _Product(nn.Linear):
    """Puts nothing off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class _Both(nn.Linear):
    """Uses its weight by `linear`, and by a product of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight) + x @ self.weight


@pytest.mark.parametrize(
    ("stage", "is_known", "text"),
    [
        (nn.Linear, False, "WeightGradients(most_kept=1) has the waits of an Overlap run weight gradients, and"),
        (_Both, True, "stage 0 uses 'weight' in a linear layer that puts weight gradients off, and in another way"),
        (None, True, "a budget cannot be planned for weight gradients that stay for later waits"),
    ],
)
def test_what_cannot_be_kept_is_refused(stage: Any, is_known: bool, text: str) -> None:
    weights = WeightGradients(most_kept=1)
    run_pair = Overlap(weight_gradients=weights if is_known else None).run_pair
    batch = [torch.randn(2, 4), torch.randn(2, 4)]

    def step() -> None:
        pipeline = Pipeline(
            make_schedule("gpipe", num_ranks=1, num_micro_batches=2),
            {0: (stage or nn.Linear)(4, 4, bias=False)},
            loss=nn.functional.mse_loss,
            weight_gradients=weights,
            run_pair=run_pair,
        )
        if stage is None:
            fit_stages(pipeline, batch, batch, budget="1GiB")
        pipeline.step(batch, batch)

    with pytest.raises(ConfigError, match=re.escape(text)):
        step()


def test_a_stage_that_puts_nothing_off_trains_all_the_same() -> None:
    """A rank may have no linear layer, and others have some."""
    stage, batch = _Product(4, 4, bias=False), [torch.randn(2, 4), torch.randn(2, 4)]
    for x in batch:
        nn.functional.mse_loss(stage(x), x).backward()
    assert stage.weight.grad is not None
    wanted, stage.weight.grad = stage.weight.grad / 2, None
    schedule, weights = make_schedule("zb_v", num_ranks=1, num_micro_batches=2), WeightGradients(most_kept=1)
    how: dict[str, Any] = {"weight_gradients": weights, "run_pair": Overlap(weight_gradients=weights).run_pair}
    stages = {0: stage, 1: nn.Identity()}
    Pipeline(schedule, stages, loss=nn.functional.mse_loss, **how).step(batch, batch)
    assert torch.equal(stage.weight.grad, wanted)


@pytest.mark.parametrize(
    ("place", "schedule"),
    [
        (0, make_schedule("zb_v", num_ranks=1, num_micro_batches=2)),
        (1, make_schedule("zb_v", num_ranks=1, num_micro_batches=2)),
        (1, from_csv("0F0,1F0,1B0,0B0,0F1,1F1,1I1,0I1,0W1,1W1", source="here", name="late")),
    ],
    ids=["in a stage", "in the loss", "the first backward is not split"],
)
def test_a_linear_layer_whose_weight_is_used_in_another_way_is_refused(place: int, schedule: Schedule) -> None:

    class Regular(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self[0].weight.square().mean()

    stages = {stage: (Regular if stage == place == 0 else nn.Sequential)(nn.Linear(4, 4)) for stage in (0, 1)}

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = nn.functional.mse_loss(output, target)
        return found + stages[1][0].weight.square().mean() if place else found

    pipeline = Pipeline(schedule, stages, loss=loss, weight_gradients=WeightGradients())
    batch = [torch.randn(2, 4), torch.randn(2, 4)]
    with pytest.raises(ConfigError) as caught:
        pipeline.step(batch, batch)
    assert str(caught.value) == (
        f"pipeline: stage {place} uses '0.weight' in a linear layer that puts weight gradients off, and in another "
        "way: they would be added up in another order. Use it in one way, make the layer a subclass of nn.Linear "
        "(which puts nothing off), or leave weight_gradients out"
    )
    pipeline.close()
    assert not any("forward" in vars(module) for stage in stages.values() for module in stage.modules())
