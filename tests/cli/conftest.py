"""Commands of these tests ask for the same few traced steps over and over: each is traced once a process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

_TRACED: dict[str, Any] = {}
"""What decides a traced step, in words -> its profile, which is frozen."""


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if "torch" not in sys.modules:  # plain tests do not pay for it
        return
    from lowtide.cli import run_step
    from lowtide.config.memory import MemoryConfig

    trace = run_step.trace_run

    def trace_run(run: Any, hardware: Any, *, say: Callable[[str], None], like: Any = None) -> Any:
        path = run.model.path
        texts = sorted(file.read_text() for file in ([path] if path.is_file() else path.glob("*.json"))) if path else ()
        asked = (run.model, run.data, run.train, run.parallel, run.pipeline, (run.memory or MemoryConfig()).slices_loss)
        key = repr((texts, asked, hardware))
        if key not in _TRACED:
            _TRACED[key] = trace(run, hardware, say=say, like=like)
        return _TRACED[key]

    monkeypatch.setattr(run_step, "trace_run", trace_run)


@pytest.fixture
def forget_traces() -> Callable[[], None]:
    """What is asked for after a call of it is traced anew."""
    return _TRACED.clear
