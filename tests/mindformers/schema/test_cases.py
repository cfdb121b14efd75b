"""Every form, every trap and the documented examples, as data: cases/*.json.

A case has the two sections as written (`{"tuple": [...]}` stands for a Python tuple), the grid, and a tree of names
from trees.json (null: an operator). `compat` is the whole expected result, layer by layer where something happens;
`compat_error` and `strict_error` are exact. Without `strict_error` strict mode gives the same layers as compat, or the
same error.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.mindformers import schema
from lowtide.mindformers.schema import Resolution
from tests.support.sections import resolve

FOLDER = Path(__file__).parent / "cases"
TREES = json.loads((FOLDER / "trees.json").read_text())
CASES = json.loads((FOLDER / "recompute.json").read_text()) + json.loads((FOLDER / "swap.json").read_text())
PER_LAYER = {
    "ops": "recompute_ops",
    "comm": "comm_recompute_ops",
    "exclude": "recompute_exclude_ops",
    "comm_exclude": "comm_recompute_exclude_ops",
    "swap": "swap_ops",
    "holes": "swap_holes",
    "stays": "swap_stays",
}


def written(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            tuple(map(written, value["tuple"]))
            if set(value) == {"tuple"}
            else {k: written(v) for k, v in value.items()}
        )
    return [written(item) for item in value] if isinstance(value, list) else value


def run(case: dict[str, Any], *, compat: bool) -> Resolution:
    sections = written(case["recompute_config"]), written(case["swap_config"])
    before = copy.deepcopy(sections)
    try:
        return resolve(*sections, **case["grid"], names=TREES.get(case["tree"]), compat=compat)
    finally:
        assert sections == before, "the caller's values were changed"


def by_layer(resolution: Resolution, name: str) -> dict[str, Any]:
    return {str(layer.index): getattr(layer, name) for layer in resolution.layers if getattr(layer, name)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_compat(case: dict[str, Any]) -> None:
    if "compat_error" in case:
        with pytest.raises(ConfigError) as caught:
            run(case, compat=True)
        assert str(caught.value) == case["compat_error"]
        return
    expected, result = case["compat"], run(case, compat=True)
    assert len(result.layers) == case["grid"]["num_layers"]
    if "num_layers_per_stage" in expected:
        assert result.num_layers_per_stage == expected["num_layers_per_stage"]
    for key, table in expected.get("normalized", {}).items():
        assert result.normalized[key] == table
    assert [layer.index for layer in result.layers if layer.full_recompute] == expected.get("full", [])
    for short, name in PER_LAYER.items():
        assert by_layer(result, name) == expected.get(short, {}), name
    assert result.warnings == expected.get("warnings", [])
    assert result.notes == expected.get("notes", [])
    if "log" in expected:
        assert result.log_lines == expected["log"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_strict(case: dict[str, Any]) -> None:
    error = case.get("strict_error", case.get("compat_error"))
    if error is not None:
        with pytest.raises(ConfigError) as caught:
            run(case, compat=False)
        assert str(caught.value) == error
        return
    assert run(case, compat=False).layers == run(case, compat=True).layers


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names) > 100


def test_every_difference_has_its_words_and_is_looked_for() -> None:
    room = Path(schema.__file__).parents[1]
    code = "".join(file.read_text(encoding="utf-8") for file in room.rglob("*.py"))
    code += "true_for_one_op false_for_one_op"  # made of the value that was written
    for name, words in tomllib.loads((room / "schema" / "differences.toml").read_text(encoding="utf-8")).items():
        assert list(words) == ["problem", "meaning", "fix"]
        assert re.search(rf"\b{name}\b", code), name
