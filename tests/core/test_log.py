"""The logger `lowtide`: silent unless a program listens, and then one line for each thing that happens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.log import LOG, Listener
from tests.support.virtual_engine import virtual


def test_a_listener_hears_lines_until_it_is_closed_and_leaves_the_level_as_it_was() -> None:
    first: list[str] = []
    second: list[str] = []
    before, others = LOG.level, list(LOG.handlers)
    with Listener(first.append):
        with Listener(second.append):
            LOG.info("one %d", 1)
        LOG.info("two")
        LOG.debug("no line")
    LOG.info("three")
    assert (first, second) == (["one 1", "two"], ["one 1"])
    assert LOG.level == before and LOG.handlers == others


def test_a_budget_says_when_it_observes_and_what_it_plans(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, logger="lowtide")
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)):
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
    lines = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    assert lines[0] == "lowtide: observing one step (first step)"
    assert lines[2].startswith("lowtide: plan ") and "(first step): peak " in lines[2]
    assert [record.levelname for record in caplog.records if record.name == "lowtide"] == ["INFO"] * len(lines)
