"""Every schedule, every fate, models of transformers: losses, norms, gradients and weights of two steps are those of
one process, to the bit. On two ranks a selection that has every schedule with every fate that rules ask for, every
model with each of these; `extended` has all, also on four ranks, which test_execute.py has too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

from lowtide.errors import ConfigError
from lowtide.pipeline.cut_model import cut
from tests.support import grid_jobs, two_ranks
from tests.support.grid import one_of
from tests.support.grid_jobs import FATES, MODELS, names_of
from tests.support.zoo import same_bits

Row = tuple[str, str, str]
"""Model, schedule, fate."""


def selected() -> list[Row]:
    """So few rows that each fate of rules is there with each model and each schedule. To plan takes ten times as long
    as the steps; budgets are in test_budget.py, and of a model of transformers below."""
    fates = [fate for fate in FATES if fate != "budget"]
    every = list(itertools.product(MODELS, names_of(2), fates))
    missing = {pair for row in every for pair in pairs(row)}
    found: list[Row] = []
    while missing:
        best = max(every, key=lambda row: len(missing.intersection(pairs(row))))
        found.append(best)
        missing.difference_update(pairs(best))
    return found


def pairs(row: Row) -> Iterator[tuple]:
    """All but that of a model and a schedule, which meet in the stages alone."""
    model, schedule, fate = row
    return iter([("model", model, fate), ("schedule", schedule, fate)])


def check(rows: list[Row], num_ranks: int, folder: Path) -> None:
    jobs = [("ran", {"kind": kind, "name": name, "fate": fate}) for kind, name, fate in rows]
    jobs += [("three_share", {})] * (num_ranks == 4)
    told = two_ranks.run(grid_jobs.__name__, jobs, folder, num_ranks=num_ranks)
    wrong = [(job, each) for job, answers in zip(jobs, told, strict=True) for each in answers if each]
    assert wrong == []


def test_a_selection_with_every_fate_of_every_model_and_schedule(tmp_path: Path) -> None:
    check(selected(), 2, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_combinations(num_ranks: int, kind: str, fate: str, tmp_path: Path) -> None:
    check([(kind, name, fate) for name in names_of(num_ranks)], num_ranks, tmp_path)


@pytest.mark.parametrize("fate", [pytest.param(fate, marks=pytest.mark.extended) for fate in FATES] + ["each"])
@pytest.mark.parametrize("kind", one_of(2, MODELS, first=1))
def test_one_rank(kind: str, fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "each": one fate for each model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fate = FATES[MODELS.index(kind) % len(FATES)] if fate == "each" else fate
    assert grid_jobs.ran(0, kind, "one_stage_overlap", fate) == []


@pytest.mark.parametrize("kind", MODELS)
def test_the_stages_together_are_the_model(kind: str) -> None:
    tokens = grid_jobs.texts_of(0)[0]
    wanted = grid_jobs.model_of(kind, 4)(tokens).logits
    output = tokens
    for stage in grid_jobs.stages_of(kind, 4, 4):
        output = stage(output)
    assert same_bits(output, wanted)


def test_a_model_with_an_encoder_is_refused() -> None:
    model = AutoModelForSeq2SeqLM.from_config(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=8)
    )
    with pytest.raises(ConfigError) as caught:
        cut(model, [range(1), range(1, 2)])
    assert str(caught.value) == (
        "pipeline: a model of kind 't5' cannot be cut into stages; known are llama, qwen3_moe, deepseek_v3. Give "
        "Pipeline stages of your own"
    )
    with torch.no_grad():  # and it is a model that runs
        model(input_ids=torch.tensor([[1, 2]]), decoder_input_ids=torch.tensor([[1]]))
