"""A check of lowtide that is switched off is noticed by the attack."""

from __future__ import annotations

import pytest

from tests.attack.broken import CHECKS, prove


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_a_missing_check_is_noticed(name: str) -> None:
    assert prove(name, 300) is not None
