"""The observed step tries codecs on what it saves; whoever watches the step's operators sees none of that."""

from __future__ import annotations

import torch

from lowtide.profiling.smaller import measured_codec, traced_codec
from lowtide.timeline.hardware import load_hardware
from tests.support.failing import Failing


def test_no_mode_sees_the_operators_of_a_trial() -> None:
    mask = torch.arange(4096) % 3 == 0
    with Failing() as counting:
        assert measured_codec(mask.untyped_storage(), torch.bool) is not None
        assert measured_codec(torch.ones(4096).untyped_storage(), torch.float32) is not None
    assert counting.num_ops == 1  # `ones`


def test_a_trace_narrows_indices_that_are_below_a_limit() -> None:
    device = load_hardware("h200")
    assert traced_codec(1 << 20, torch.int64, device) is None
    found = traced_codec(1 << 20, torch.int64, device, 112 * 112)
    assert found is not None
    assert (found.kind, found.nbytes) == ("int16", 1 << 18)
    assert found.seconds >= 4 * (1 << 20) / 4.8e12  # no faster than memory
