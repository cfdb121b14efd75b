"""Pairs that overlap, split experts, torch's tensor parallelism with the sequence split, recompute, swap and a swapped
optimizer, in one pipeline on four ranks: what one process computes, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import all_at_once_jobs, two_ranks
from tests.support.all_at_once_jobs import SIZE


@pytest.mark.extended  # with a run file: tests/examples/train/test_all_at_once.py
def test_all_of_it_together_trains_as_one_process(tmp_path: Path) -> None:
    (told,) = two_ranks.run(all_at_once_jobs.__name__, [("everything", {})], tmp_path, num_ranks=4)
    losses, weights = all_at_once_jobs.alone()
    # The last stage of a V is on the first rank of each of two pipelines, which have a part of the sequence each.
    parts = [losses_of_rank for losses_of_rank, *_ in told]
    assert [sum(both) for both in zip(*parts[:SIZE], strict=True)] == pytest.approx(losses, rel=1e-5)
    assert parts[SIZE:] == [[], []]
    seen = set()
    for _, ends, again, swapped, moved in told:
        assert swapped > 0
        assert again > 0
        assert moved > 0
        for name, weight in ends.items():
            torch.testing.assert_close(torch.from_numpy(weight), weights[name], rtol=1e-4, atol=1e-6)
            seen.add(name)
    assert seen == set(weights)
