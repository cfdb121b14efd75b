"""Where stages live, and which layers they have."""

from __future__ import annotations

import pytest

from lowtide.errors import ConfigError
from lowtide.pipeline.schedule import Action, Kind, Result, Schedule, as_v, in_rounds, layers_of_stages


def test_stages_go_round_or_down_and_back() -> None:
    assert in_rounds(3, 2) == (0, 1, 2, 0, 1, 2)
    assert as_v(3) == (0, 1, 2, 2, 1, 0)
    v = Schedule("v", 1, as_v(3), ((), (), ()))
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_each_end_of_a_transfer_knows_what_it_carries() -> None:
    output, gradient = Result(Kind.FORWARD, 3, 7), Result(Kind.BACKWARD, 3, 7)
    assert str(output.send) == "3SEND_F7" and str(output.receive) == "4RECV_F7"
    assert str(gradient.send) == "3SEND_B7" and str(gradient.receive) == "2RECV_B7"
    for result in (output, gradient):
        assert result.send.carries == result.receive.carries == result


def test_the_ends_of_the_model_read_and_give_nothing() -> None:
    schedule = Schedule("one", 1, (0,), ((),))
    assert list(schedule.needs(Action(Kind.FORWARD, 0, 0))) == []
    assert list(schedule.needs(Action(Kind.BACKWARD, 0, 0))) == [Result(Kind.FORWARD, 0, 0)]
    assert schedule.reader(Result(Kind.FORWARD, 0, 0)) is None
    assert schedule.reader(Result(Kind.BACKWARD, 0, 0)) is None


def test_layers_split_evenly() -> None:
    assert layers_of_stages(6, 3) == (range(2), range(2, 4), range(4, 6))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "text"),
    [
        (
            61,
            8,
            "pipeline: 61 layers do not split evenly over 8 stages; use a model of 56 or 64 layers, or a number of "
            "stages that divides 61",
        ),
        (
            3,
            8,
            "pipeline: 3 layers do not split evenly over 8 stages; use a model of 8 layers, or a number of stages that "
            "divides 3",
        ),
    ],
)
def test_layers_that_do_not_split_are_refused(num_layers: int, num_stages: int, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of_stages(num_layers, num_stages)
    assert str(caught.value) == text
