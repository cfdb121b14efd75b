"""A swapped optimizer leaves the same bits as the plain one: parameters, state and groups, for each optimizer."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from lowtide.engines.host import HostEngine
from tests.support.optimizer_zoo import NAMES, OPTIMIZERS, Case, Result, assert_same, cases, swapped, train
from tests.support.virtual_engine import VirtualEngine

EACH = [
    pytest.param(kind, name, marks=[] if at == number % len(names) else [pytest.mark.extended])
    for number, (kind, (_, names)) in enumerate(OPTIMIZERS.items())
    for at, name in enumerate(names)
]
"""Each kind by one implementation, in turn; test_mapped.py has others, and the rest is `make test-extended`'s."""


@functools.cache
def plain(case: Case) -> Result:
    return train(case, None)


def _check(case: Case, seed: int) -> None:
    engine = VirtualEngine(seed)
    assert_same(train(case, lambda optimizer: swapped(optimizer, engine)), plain(case))
    assert engine.violations == []
    assert engine.num_slots == 0


@pytest.mark.parametrize(("kind", "implementation"), EACH)
def test_same_bits(kind: str, implementation: str) -> None:
    for seed, case in enumerate(cases(kind, implementation)):
        _check(case, seed)


@pytest.mark.extended
@pytest.mark.parametrize("start", [100, 110])
@pytest.mark.parametrize(("kind", "implementation"), NAMES)
def test_same_bits_under_many_schedules(kind: str, implementation: str, start: int) -> None:
    for case in cases(kind, implementation):
        for seed in range(start, start + 5):
            _check(case, seed)


@pytest.mark.parametrize(
    ("kind", "implementation"), [("AdamW", "foreach"), ("Adafactor", "for-loop"), ("Counted", "for-loop")]
)
def test_same_bits_through_a_file(kind: str, implementation: str, tmp_path: Path) -> None:
    for case in cases(kind, implementation):
        engine = HostEngine(directory=tmp_path)
        assert_same(train(case, lambda optimizer: swapped(optimizer, engine)), plain(case))  # noqa: B023
        assert engine.memory_in_use() == {"disk": 0}
        engine.close()
