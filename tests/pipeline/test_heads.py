"""What a head says is what was written; what it cannot say is refused."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.pipeline import heads
from lowtide.pipeline.heads import Blank, Head, HeadError
from lowtide.pipeline.schedule import Kind, Result

RESULT = Result(Kind.BACKWARD, 5, 31)


def test_a_head_says_what_was_written() -> None:
    tensors = [torch.zeros(2, 0, 3, dtype=torch.bfloat16, requires_grad=True), None, torch.tensor(True)]
    blanks = (Blank((2, 0, 3), torch.bfloat16, True), None, Blank((), torch.bool, False))
    assert heads.read(heads.write(RESULT, tensors, 2.5)) == Head(RESULT, 2.5, blanks)
    assert heads.read(heads.write(RESULT, [], 10.0)) == Head(RESULT, 10.0, ())


def test_a_tensor_in_place_of_a_head_is_noticed() -> None:
    with pytest.raises(HeadError, match="what came is not the head of a message"):
        heads.read(torch.randn(heads.NUM_WORDS).to(torch.int64))


def test_a_head_of_another_version_is_noticed() -> None:
    head = heads.write(RESULT, [], 1.0)
    head[1] = heads.VERSION + 1
    with pytest.raises(HeadError, match="the head is of version 3, and this rank reads 2"):
        heads.read(head)


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        heads.write(RESULT, [torch.zeros(1, 1, 1, 1)] * 9, 1.0)
    assert str(caught.value) == (
        "pipeline: stage 5 passes on 9 tensors, which need a head of 70 integers; there are 64. Pass on fewer, for "
        "instance stacked"
    )
    heads.write(RESULT, [torch.zeros(1, 1, 1, 1)] * 8, 1.0)


def test_a_dtype_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        heads.write(RESULT, [torch.zeros(1, dtype=torch.complex64)], 1.0)
    assert str(caught.value) == "pipeline: stage 5 passes on a tensor of torch.complex64; cast it before"
