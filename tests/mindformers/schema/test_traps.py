"""Every place where upstream hangs, crashes, silently does nothing or means something else: cases/traps.json.

A row is what was written and all that comes of it: `strict` is the exact refusal without `compat` (null: none),
`compat` that with it (null: it goes on), and where it goes on: exact warnings and notes, the layers that are recomputed
whole (`full`), and what is recomputed (`ops`) and swapped (`swap`) in each layer. `{"tuple": [...]}` and
`{"pairs": [...]}` stand for Python values that JSON has not. All on upstream's names of a Llama layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Resolution
from tests.support.sections import resolve

CASES = Path(__file__).parent / "cases"
TRAPS = json.loads((CASES / "traps.json").read_text(encoding="utf-8"))
TREE = json.loads((CASES / "upstream_trees.json").read_text(encoding="utf-8"))["llama_legacy"]


def written(value: Any) -> Any:
    if isinstance(value, list):
        return [written(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"tuple"}:
        return tuple(written(value["tuple"]))
    if set(value) == {"pairs"}:
        return {written(key): written(below) for key, below in value["pairs"]}
    return {key: written(below) for key, below in value.items()}


def run(trap: dict[str, Any], *, compat: bool) -> Resolution:
    sections = written(trap["recompute_config"]), written(trap["swap_config"])
    return resolve(*sections, **trap["grid"], names=TREE, compat=compat)


def refusal(trap: dict[str, Any], *, compat: bool) -> str | None:
    try:
        run(trap, compat=compat)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap["trap"])
def test_trap(trap: dict[str, Any]) -> None:
    assert refusal(trap, compat=False) == trap["strict"]
    assert refusal(trap, compat=True) == trap["compat"]
    if trap["compat"] is not None:
        return
    result = run(trap, compat=True)
    assert result.warnings == trap["warnings"]
    assert result.notes == trap["notes"]
    assert [layer.index for layer in result.layers if layer.full_recompute] == trap["full"]
    assert {str(layer.index): layer.recompute_ops for layer in result.layers if layer.recompute_ops} == trap["ops"]
    assert {str(layer.index): layer.swap_ops for layer in result.layers if layer.swap_ops} == trap["swap"]


def test_strict_and_compat_are_consistent() -> None:
    for trap in TRAPS:
        if trap["compat"] is not None:
            assert trap["strict"] == trap["compat"], trap["trap"]
        elif trap["strict"] is not None:
            # What strict refuses, compat warns about, with the same problem at the same place.
            place = trap["strict"].split(";")[0].split(", but")[0][:40]
            assert any(warning.startswith(place) for warning in trap["warnings"]), trap["trap"]
    assert len(TRAPS) > 130
