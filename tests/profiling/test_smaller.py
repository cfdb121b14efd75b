"""The observed step tries codecs on what it saves; whoever watches the step's operators sees none of that."""

from __future__ import annotations

import torch
from failing import Failing

from lowtide.profiling.smaller import measured_codec


def test_no_mode_sees_the_operators_of_a_trial() -> None:
    mask = torch.arange(4096) % 3 == 0
    with Failing() as counting:
        assert measured_codec(mask.untyped_storage(), torch.bool) is not None
        assert measured_codec(torch.ones(4096).untyped_storage(), torch.float32) is not None
    assert counting.num_ops == 1  # `ones`
