"""Times of operators: those of one kind take as long as is usual for it."""

from __future__ import annotations

import pytest
import torch

from lowtide.profiling.op_timer import HostClock, kind_of, steady
from lowtide.recipes.graph import OpCall, Storage, Value

MM, ADD = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor


def value(*size: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] = (8, 1), offset: int = 0) -> Value:
    storage = Storage(index=offset, nbytes=1, dtype=dtype, name=f"{offset}", kind="made")
    return Value(storage, 0, size, stride, offset, dtype, torch.device("cpu"))


def call(*args: object, func: object = MM, index: int = 0, **kwargs: object) -> OpCall:
    return OpCall(index=index, func=func, args=args, kwargs=kwargs, outputs=(), name=f"{index}", seconds=0.0,
                is_collective=False)  # fmt: skip


def test_operators_of_one_kind_take_the_lower_median_of_it() -> None:
    seconds = [9.0, 2.0, 3.0, 4.0, 5.0, 1.0, 8.0]
    assert steady(seconds, ["a", "a", "a", "a", "b", "b", None]) == [3.0, 3.0, 3.0, 3.0, 5.0, 1.0, 8.0]
    assert steady([5.0, 1.0, 3.0], [None, None, None]) == [5.0, 1.0, 3.0]
    assert steady([], []) == []


def test_what_makes_a_kind() -> None:
    plain = kind_of(call(value(4, 8), value(8, 8)))
    assert plain == kind_of(call(value(4, 8, offset=3), value(8, 8, offset=5), index=7))
    others = [
        call(value(4, 8), value(8, 8), func=ADD),
        call(value(5, 8), value(8, 8)),
        call(value(4, 8, dtype=torch.bfloat16), value(8, 8)),
        call(value(4, 8, stride=(1, 4)), value(8, 8)),
        call(value(4, 8), value(8, 8), alpha=2),
        call(value(4, 8), 2.0),
        call([value(4, 8), value(8, 8)]),
    ]
    assert len({plain, *map(kind_of, others)}) == 1 + len(others)


def test_what_cannot_be_compared_is_like_nothing_else() -> None:
    assert kind_of(call(value(4, 8), {"a": 1})) is None


def test_the_clock_of_the_host_gives_equal_operators_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HostClock()
    monkeypatch.setattr(clock, "_overhead", 0.5)
    marks = [clock.seconds(mark, call(value(4, 8), value(8, 8))) for mark in (9.5, 2.5, 0.1)]
    other = clock.seconds(7.5, call(value(4, 9), value(9, 8)))
    assert clock.settle([*marks, other, (4.0, None)]) == [2.0, 2.0, 2.0, 7.0, 4.0]  # a compiled part has no kind
