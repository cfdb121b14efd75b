"""Identities of many objects at once: equal for the same objects, and for no others."""

from __future__ import annotations

import random

import pytest

from lowtide.runtime.recompute import watch as room


@pytest.mark.parametrize("of", [room.identities, room._one_by_one])
@pytest.mark.parametrize("seed", range(8))
def test_they_are_equal_for_the_same_objects_only(of, seed: int) -> None:
    draw = random.Random(seed)
    objects = [object(), [], 1.0, 0.0, -0.0, True, 1, (), float("nan"), None]
    one = tuple(draw.choices(objects, k=draw.randrange(300)))
    assert of(one) == of((*one,))
    assert of(one) != of((*one, None))
    for place in range(len(one)):
        other = draw.choice(objects)
        assert (of(one) == of((*one[:place], other, *one[place + 1 :]))) == (other is one[place])


def test_both_ways_give_the_same() -> None:
    values = (object(), None, 1)
    assert room.identities(values) == room._one_by_one(values)
