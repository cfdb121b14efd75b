"""The accelerator engine on the stand-in's clock beside the timeline: a few plans of `benchmarks.emulated`.

The plans are drawn, not solved: how fast this machine solves changes nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.agreement import kendall_tau
from benchmarks.emulated import Emulated, summary
from lowtide.profiling.smaller import measured_codec
from lowtide.timeline.hardware import load_hardware
from tests.standin import device
from tests.support.grid import one_of

DRAWS = (1, 2, 5, 8)


@pytest.mark.parametrize(("model", "name"), one_of(3, [("gpt2", "rtx4090"), ("qwen3_moe", "h200"), ("llama", "h200")]))
def test_the_engine_takes_the_time_that_the_timeline_says(model: str, name: str) -> None:
    emulated = Emulated(model, load_hardware(name), layers=2)
    rows = []
    for draw in DRAWS:
        plan, how = emulated.plan(draw)
        rows.append({"model": model, "device": name, "plan": how, **emulated.row(plan)})
    (found,) = summary(rows)
    assert found["is_equal"]
    assert found["time_error_median_percent"] <= 2, rows
    assert found["time_error_worst_percent"] <= 5, rows
    assert found["stall_error_worst_percent"] <= 5, rows
    said, took = ([row[key] for row in rows] for key in ("predicted_seconds", "emulated_seconds"))
    assert kendall_tau(said, took, least=0.02 * min(said)) in (None, 1), rows
    assert max(row["stall_seconds"] for row in rows) > 0, "nothing waited: the test shows nothing"


def test_a_codec_is_priced_by_the_clock_of_the_device() -> None:
    """Not by the host's, which waits for the device here and is ahead of it in a step."""
    mask = torch.ones(2**16, dtype=torch.bool, device=device.NAME)
    prices = []
    for rate in (1e9, 2e9):
        device.set_speeds(memory=rate, launch=0.0)
        codec = measured_codec(mask.untyped_storage(), torch.bool)
        assert codec is not None
        prices.append(codec.seconds)
    assert prices[0] == pytest.approx(2 * prices[1])
    assert prices[0] > mask.nbytes / 1e9
