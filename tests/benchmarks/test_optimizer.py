"""Optimizer state on its way: the model of the modes against numbers that can be worked out, and the command."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import get_args

import pytest

from benchmarks import optimizer
from benchmarks.optimizer_modes import StateTraffic, TrafficCost, play_traffic
from benchmarks.record import read_all
from lowtide.core.decisions import Overlap
from lowtide.timeline.events import run
from lowtide.timeline.step import Link, Step, Tick

LINK = Link(out_bytes_per_second=100.0, in_bytes_per_second=100.0, compute_share=0.1)
"""A bucket of 100 bytes takes a second."""


def step_of(num_forward: int, num_backward: int, *, base: int = 0, at_end: int = 200) -> Step:
    """Ticks of one second without activations, and that of the optimizer with its two slots."""
    ticks = [Tick(seconds=1.0, base_bytes=base) for _ in range(num_forward + num_backward)]
    return Step(
        ticks=(*ticks, Tick(seconds=0.0, base_bytes=at_end)), num_forward_ticks=num_forward, items=()
    )  # fmt: skip


def cost_of(overlap: Overlap, step: Step, *, moved: int = 400, budget: int | None = None) -> TrafficCost:
    traffic = StateTraffic(moved_bytes=moved, bucket_bytes=100, num_slots=2, overlap=overlap)
    return play_traffic(step, run(step, (), LINK, with_events=True), LINK, traffic, budget)


def test_the_step_mode_waits_for_every_fetch() -> None:
    """Both directions at once: the time of the transfer in, which is the formula s P / BW."""
    cost = cost_of("step", step_of(4, 8))
    assert cost.exposed_seconds == pytest.approx(4.0)
    assert cost.prefetched_bytes == 0 and cost.free_share is None
    assert cost.slowed_seconds == pytest.approx(0.1 * 1.0), "the last copy back runs beside the next forward"


def test_what_backward_can_hide_is_not_exposed() -> None:
    cost = cost_of("backward", step_of(4, 8))
    assert cost.exposed_seconds == 0.0
    assert cost.slowed_seconds == pytest.approx(0.1 * 8.0)
    assert cost.prefetched_bytes == 400


def test_a_short_backward_hides_its_own_length() -> None:
    assert cost_of("backward", step_of(4, 3)).exposed_seconds == pytest.approx(1.0)
    assert cost_of("in_backward", step_of(4, 3)).exposed_seconds > 0.0


def test_updates_in_backward_need_two_slots_only() -> None:
    cost = cost_of("in_backward", step_of(4, 16))
    assert cost.exposed_seconds == pytest.approx(0.0)
    assert max(cost.held) <= 200


def test_memory_that_backward_does_not_free_hides_nothing() -> None:
    full = step_of(4, 8, base=1000)
    assert cost_of("backward", full, budget=1000).exposed_seconds == pytest.approx(4.0 + 1.0), "and a copy to send back"
    half = cost_of("backward", full, budget=1200)
    assert half.exposed_seconds < 5.0
    assert all(there.base_bytes + held <= 1200 for there, held in zip(full.ticks, half.held, strict=True))


def test_free_from_so_many_of_these_steps() -> None:
    assert cost_of("backward", step_of(4, 8)).free_share == pytest.approx(4.0 / 4.0)
    assert cost_of("backward", step_of(16, 8)).free_share == pytest.approx(4.0 / 8.0)


@pytest.mark.extended
def test_the_command_by_the_timeline(tmp_path: Path) -> None:
    words = [
        "--device=timeline",
        "--hardware=h100",
        "--layers=2",
        "--tokens=4096",
        "--micro-batches=2",
        "--out",
        str(tmp_path),
    ]
    assert optimizer.main(words) == 0
    (record,) = read_all(tmp_path)
    assert (record.question, record.kind) == ("optimizer", "computed")
    titles = ["state stays", *(f"planner, {kind}" for kind in optimizer.KINDS[1:])]
    titles += [f"mode {mode}" for mode in get_args(Overlap)]
    assert [row["title"] for row in record.rows] == titles * len(optimizer.STATES)
    for row in record.rows:
        if row["shards"] > 1 and row["title"].endswith("in_backward"):
            assert row["outcome"] == "refused: several ranks"
            continue
        assert 0.0 <= row["exposed_percent"] <= 100.0
        assert row.get("peak_bytes") is None or row["peak_bytes"] <= 0.92 * 80e9
    by_title = {row["title"]: row for row in record.rows[: len(titles)]}
    assert by_title["planner, auto"]["step_seconds"] <= by_title["state stays"]["step_seconds"]
    assert by_title["mode backward"]["exposed_seconds"] <= by_title["mode step"]["exposed_seconds"]


def test_the_command_by_the_clock(tmp_path: Path) -> None:
    assert optimizer.main(["--device=cpu", "--hidden=32", "--rounds=2", "--out", str(tmp_path)]) == 0
    (record,) = read_all(tmp_path)
    assert record.kind == "measured"
    rows = {row["title"]: row for row in record.rows}
    assert list(rows) == list(optimizer.WAYS)
    assert rows["plain AdamW"]["is_equal"]
    for title, package in (("torchao CPUOffloadOptimizer", "torchao"), ("bitsandbytes PagedAdamW", "bitsandbytes")):
        if importlib.util.find_spec(package) is None:
            assert rows[title]["error"] == f"ModuleNotFoundError: No module named '{package}'"
