"""A pipeline computes what one process computes, also where stages share weights and the loss has some; ranks that
disagree are told so, all of them, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import shared_jobs, two_ranks

HOW = ("a layer", "an MLP", "one weight")
CUT = [("llama", "1f1b"), ("qwen3_moe", "gpipe"), ("deepseek_v3", "interleaved"), ("llama", "dualpipev")]
JOBS: dict[str, two_ranks.Job] = {
    "cut": ("cut_models", {"each": CUT}),
    "losses": ("weights_of_losses", {}),
    "buffers": ("shared_buffers", {}),
    "warned": ("warned", {}),
    "drifts": ("drifts", {}),
    "refusals": ("refusals", {}),
    **{how: ("shared", {"how": how}) for how in HOW},
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("ranks")
    return dict(zip(JOBS, two_ranks.run(shared_jobs.__name__, list(JOBS.values()), folder), strict=True))


def test_tied_embeddings_on_two_ranks_train_as_one_weight(told: dict[str, tuple[Any, ...]]) -> None:
    assert told["cut"] == ([[]] * len(CUT),) * 2


@pytest.mark.parametrize("how", HOW)
def test_what_stages_share_is_refused_until_it_is_named_and_then_kept_equal(
    told: dict[str, tuple[Any, ...]], how: str
) -> None:
    first = {"a layer": "0.1.norm.weight", "an MLP": "0.0.mlp.weight", "one weight": "0.0.scale"}[how]
    other = {"a layer": "3.0.norm.weight", "an MLP": "1.0.mlp.weight", "one weight": "3.0.scale"}[how]
    if how == "a layer":  # the norms begin with ones, which say nothing
        first, other = "0.1.scale", "3.0.scale"
    places = [f"'{place.partition('.')[2]}' of stage {place[0]}" for place in (first, other)]
    text = (
        f"pipeline: {places[0]} (rank 0) and {places[1]} (rank 1) have the same values. If they are one weight, give "
        "tied=find_ties(stages) with all stages of the model; if they only begin alike, give tied=()"
    )
    assert told[how] == ((text, []),) * 2


def test_a_shared_buffer_that_is_written_is_refused(told: dict[str, tuple[Any, ...]]) -> None:
    def text(one: str, other: str) -> str:
        return (
            f"pipeline: '1.total' of stage {one} is one buffer with '1.total' of stage {other}, and stage {one} has "
            "written it, which no other rank sees; give each stage a buffer of its own"
        )

    for pair, said in zip(("01", "03"), zip(*told["buffers"], strict=True), strict=True):
        assert said == (text(*pair),) * 2


def test_weights_of_the_loss_and_behind_the_inputs_are_divided_once(told: dict[str, tuple[Any, ...]]) -> None:
    assert told["losses"] == ([], [])


def test_random_draws_are_said_once(told: dict[str, tuple[Any, ...]]) -> None:
    for rank, said in enumerate(told["warned"]):
        assert said == [
            f"lowtide: pipeline: stage {rank} draws random numbers (dropout). One process draws them in another order, "
            "so its losses are not these to the bit"
        ]


def test_copies_that_are_not_equal_are_refused(told: dict[str, tuple[Any, ...]]) -> None:
    one, other = "'model.embed_tokens.weight' of stage 0 (rank 0)", "'head.weight' of stage 1 (rank 1)"
    for rank, (seed, rate) in enumerate(told["drifts"]):
        words = "are one weight and have other values; begin with the same, and give their optimizers the same settings"
        assert seed == f"pipeline: {one} and {other} {words}"
        mine, theirs = (one, other) if rank == 0 else (other, one)
        assert rate.endswith((f"pipeline: {mine} and {theirs} {words}", f"pipeline: {theirs} and {mine} {words}"))


def test_ranks_that_disagree_are_told_by_name(told: dict[str, tuple[Any, ...]]) -> None:
    loss = (
        "pipeline: the loss of micro-batch 0 has no graph, so nothing would get a gradient; it was computed without "
        "gradients, or detached, or from what is not trained"
    )
    for rank, said in enumerate(told["refusals"]):
        for how in ("detached", "of numbers", "no_grad"):
            place = "rank 1 failed at 1F0 of step 1: ConfigError: "
            assert said[how] == (f"ConfigError: {loss}" if rank else f"PipelineError: pipeline: {place}{loss}")
        head = "ConfigError: pipeline: ranks have different"
        assert said["lr"] == f"{head} optimizer settings: 'lr': rank 0 has 0.001, rank 1 has 0.002"
        assert said["divide_by"] == f"{head} values of divide_by: rank 0 has 3.0, rank 1 has 6.0"
        assert said["autocast"] == f"{head} autocast: rank 0 has off, rank 1 has torch.bfloat16"
        assert said["model"] == (
            "pipeline: ranks have different model fields: 'rms_norm_eps': rank 0 has 1e-05, rank 1 has 2e-05"
        )
        assert said["fit_stages"] == (
            "ConfigError: pipeline: rank 0 is at fit_stages, and rank 1 at the first step; all ranks must make the "
            "same calls (a budget is for all ranks or for none)"
        )
        assert said["divide_by later"].startswith(f"{head} values of divide_by: rank 0 has ")
