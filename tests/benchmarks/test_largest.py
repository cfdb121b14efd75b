"""The search of question (b) finds what a walk through all sizes finds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from benchmarks.largest import find_largest, table


def walk(peak_at: Callable[[int], int | None], budget_bytes: int, most: int) -> int:
    fitting = [size for size in range(1, most + 1) if (peak_at(size) or math.inf) <= budget_bytes]
    return max(fitting, default=0)


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_the_largest_size(seed: int) -> None:
    draw = random.Random(seed)
    fixed, slope, power = draw.randint(0, 500), draw.randint(1, 60), draw.choice([1.0, 1.0, 1.3, 2.0, 0.5])
    fails_from = draw.choice([10**9, draw.randint(1, 80)])
    tried = []

    def peak_at(size: int) -> int | None:
        tried.append(size)
        return fixed + int(slope * size**power) if size < fails_from else None

    budget, start, most = draw.randint(1, 4000), draw.randint(1, 16), draw.randint(16, 200)
    found, peaks = find_largest(peak_at, budget_bytes=budget, start=start, most=most, closeness=0.0)
    assert list(peaks) == tried
    assert len(tried) == len(set(tried)) <= 16
    assert found == walk(peak_at, budget, most)


def test_a_line_takes_few_tries_and_closeness_fewer() -> None:
    exact, peaks = find_largest(lambda size: 100 + 10 * size, budget_bytes=1105, start=8, most=1000, closeness=0.0)
    assert exact == 100
    assert len(peaks) == 4
    near, fewer = find_largest(lambda size: size * size, budget_bytes=90_000, start=8, most=1000, closeness=0.1)
    assert 270 <= near <= 300
    assert len(fewer) <= 10


def test_an_optimizer_of_rate_0_changes_no_weight_and_its_state_is_there() -> None:
    from benchmarks import subjects
    from benchmarks.worker import compare, take_gradients

    plain, stepped = (subjects.build("gpt2", subjects.shape("gpt2", "tiny")) for _ in range(2))
    stepped.add_optimizer()
    for _ in range(2):
        want, got = (take_gradients(each, each.step()) for each in (plain, stepped))
        assert compare(want, got)["is_equal"]
    assert len(stepped.optimizer.state) == len(list(stepped.model.parameters()))


def test_the_table_says_whether_the_loss_was_sliced_and_what_was_moved() -> None:
    row = {"model": "llama", "measure": "batch", "title": "plain", "error": None, "is_equal": True, "size": 4}
    row |= {"ratio_median": 1.0, "peak_bytes": 2**30, "budget_bytes": 2**30, "seconds": 1.0, "tokens": 400}
    ours = row | {"title": "lowtide", "size": 6, "ratio_median": 1.5, "loss": "sliced", "state_bytes_moved": 14 * 2**20}
    whole = row | {"vocabulary": 16384, "optimizer": "adamw"}
    header, first, plain, lowtide, second, _ = table([row, ours, whole]).splitlines()
    assert (first, second) == ("-- largest llama, batch", "-- largest llama, 16,384 words, adamw, batch")
    assert header.endswith("equal  loss    moved MiB")
    assert plain.split()[-3:] == ["1.00", "2.50", "yes"]
    assert lowtide.split()[-3:] == ["yes", "sliced", "14"]
