"""A check of lowtide that is switched off is noticed by the attack."""

from __future__ import annotations

import pytest

from tests.attack.broken import CHECKS, prove

NOTICED_BEFORE = {"numbers of a recipe": 131, "operands of a recipe": 21}
"""Where few draws need the check, one that does is tried first."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_a_missing_check_is_noticed(name: str) -> None:
    assert prove(name, [NOTICED_BEFORE.get(name, 0), *range(300)]) is not None
