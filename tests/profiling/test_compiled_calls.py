"""What is on record around the call of a compiled part."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lowtide.profiling import step_recorder


class Watch:
    """Which of the hooks around a module ran, with what."""

    state = None

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.seen.append((f"enter {name}", args))

    def begin(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.seen.append((f"begin {name}", args))

    def end(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        self.seen.append((f"end {name}", output))

    def leave(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        self.seen.append((f"leave {name}", output))


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_around_a_compiled_part_are_those_around_a_module(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is caught before hooks of others change it; a call that fails has no output to catch."""

    def run(state: Any, module: nn.Module, call: Any, args: tuple, kwargs: dict) -> Any:
        return call(*args, **kwargs)

    def call(x: int) -> int:
        if fails:
            raise ValueError
        return x + 1

    monkeypatch.setattr(step_recorder, "_run", run)
    watch: Any = Watch()
    part = ("layers.0", nn.Identity())
    if fails:
        with pytest.raises(ValueError):
            step_recorder.run_compiled(watch, part, call, (1,), {})
    else:
        assert step_recorder.run_compiled(watch, part, call, (1,), {}) == 2
    output = None if fails else 2
    caught = [] if fails else [("end layers.0", 2)]
    assert watch.seen == [("enter layers.0", (1,)), ("begin layers.0", (1,)), *caught, ("leave layers.0", output)]
