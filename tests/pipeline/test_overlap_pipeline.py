"""Pairs of a pipeline that hide their exchanges: on two ranks, with the bits of one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import two_ranks

CASES: dict[str, dict[str, Any]] = {
    "dualpipev": {"schedule": "dualpipev"},
    "interleaved": {"schedule": "interleaved_overlap"},
    "recompute": {"schedule": "dualpipev", "memory": {"recompute": "all"}},
    "swap": {"schedule": "dualpipev", "memory": {"swap": "all", "min_bytes": 0}},
    "none kept": {"schedule": "interleaved_overlap", "most_kept": 0, "memory": {"recompute": "all"}},
    "two kept": {"schedule": "dualpipev", "most_kept": 2},
    "two kept, cast": {"schedule": "dualpipev", "most_kept": 2, "change": "autocast"},
    "two kept, checkpoints": {"schedule": "dualpipev", "most_kept": 2, "change": "checkpoint"},
}


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[Any, Any]]:
    jobs = [("pipeline", arguments) for arguments in CASES.values()]
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(CASES, two_ranks.run("tests.pipeline.overlap_jobs", jobs, Path(folder)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_with_overlap_has_the_bits_of_one_process(answers: dict[str, tuple[Any, Any]], name: str) -> None:
    for rank in answers[name]:
        assert rank["different"] == [[], []]
        # Every exchange of a pair is hidden, and none of the others.
        assert rank["num_exposed"] == rank["num_alone"] > 0
        assert rank["num_issues"] > rank["num_alone"]
        # Weight gradients hide every second exchange of a backward alone, and more where some are kept.
        assert 4 * rank["num_filled"] >= (rank["num_alone"] if "kept" in name else 0)
