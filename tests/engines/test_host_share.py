"""How much of a machine's memory one rank of several pins."""

from __future__ import annotations

import pytest

from lowtide.engines.accelerator import _host_cap_bytes
from lowtide.engines.tiers.host_limit import host_limit


def test_ranks_of_one_machine_share_four_fifths_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight that took all of it would together pin six times what there is."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone_bytes, limit_bytes = _host_cap_bytes(None), host_limit().limit_bytes
    assert limit_bytes is not None
    assert alone_bytes == pytest.approx(0.8 * limit_bytes, rel=0.1)  # what is free changes from one look to the next
    for num_ranks in (1, 2, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
        assert _host_cap_bytes(None) == pytest.approx(alone_bytes / num_ranks, rel=0.1)


def test_what_the_user_says_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert _host_cap_bytes(1 << 20) == 1 << 20
