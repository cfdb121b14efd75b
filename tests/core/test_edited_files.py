"""Plan and profile files that people have edited: a wrong value gives one clear line, or a file with which everything
that reads it can work. No other error ends a command."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli.diff import diff_lines, plan_diff
from lowtide.config.memory import load_memory
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.export import export
from lowtide.timeline.hardware import load_hardware
from tests.support.profiles import decoder_profile

LINK = load_hardware("h200").link
PLAN = Plan.from_json((Path(__file__).parent / "golden" / "solved_plan.json").read_text())
PROFILE = decoder_profile(2, hidden=True)
WRONG = (None, True, -1, 2**70, 0.5, float("nan"), float("-inf"), "", "banana", [], [[]], {}, {"a": 1})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values, containers too; of a list, its first two and its last entry."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from leaves(value[index], (*path, index))


def edits(text: str) -> Iterator[tuple[str, str]]:
    """What was done, and the text that it gives: each value replaced, removed, or given a key that nobody knows."""
    whole = json.loads(text)
    # Entries of a list have one type: a place is edited once, in the first entry that has it.
    places: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for path in leaves(whole):
        places.setdefault(tuple("*" if isinstance(step, int) else step for step in path), path)
    for path in places.values():
        if not path:
            continue
        around = copy.deepcopy(whole)
        inner = around
        for step in path[:-1]:
            inner = inner[step]
        right = inner[path[-1]]
        for wrong in WRONG:
            inner[path[-1]] = wrong
            yield f"{path} = {wrong!r}", json.dumps(around)
        if isinstance(right, dict):
            inner[path[-1]] = {**right, "banana": 1}
            yield f"{path} has a banana", json.dumps(around)
        del inner[path[-1]]
        yield f"{path} is gone", json.dumps(around)


def check_line(error: ConfigError, begins: str) -> None:
    text = str(error)
    assert text.startswith(begins)
    assert "\n" not in text.splitlines()[0]


def test_no_edited_plan_ends_in_a_traceback() -> None:
    num_refused = 0
    for what, text in edits(PLAN.to_json()):
        try:
            plan = Plan.from_json(text)
        except ConfigError as error:
            check_line(error, "plan: ")
            num_refused += 1
            continue
        try:
            str(plan), plan.to_json()
            diff_lines(plan_diff(PLAN, plan), "a", "b", 80)
            export(plan, "megatron", PROFILE, link=LINK)
        except ConfigError:
            pass
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
    assert num_refused > 900


def test_no_edited_profile_ends_in_a_traceback() -> None:
    memory = load_memory({"budget": "900MiB"})
    num_refused = 0
    accepted: dict[str, str] = {}
    for what, text in edits(PROFILE.to_json()):
        try:
            profile = Profile.from_json(text)
        except ConfigError as error:
            check_line(error, "profile: ")
            num_refused += 1
            continue
        accepted.setdefault(profile.to_json(), what)
    assert num_refused > 900
    for text, what in accepted.items():
        try:
            plan_profile(Profile.from_json(text), memory, link=LINK, with_suggestions=False, time_limit_seconds=0.2)
        except ConfigError:
            pass
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
