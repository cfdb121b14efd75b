"""Cases recorded from MindSpore Transformers give the same here; see upstream.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mindformers.schema.upstream import misses
from tests.support.sections import resolve

CASES = json.loads((Path(__file__).parent / "cases" / "upstream.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.get("id") or Path(case["path"]).name)
def test_agrees(case: dict[str, Any]) -> None:
    assert misses(case) == []


def test_a_wrong_table_would_be_seen() -> None:
    case = json.loads(json.dumps(CASES[0]))
    case["expected_normalized"]["layer_recompute"] = [[9]]
    assert misses(case)


def test_the_reader_in_the_next_layer() -> None:
    swap = {"swap": True, "layer_swap": [{"backward_prefetch": 3, "layers": [0, 1]}]}
    result = resolve({"recompute": [2]}, swap, num_layers=3)
    assert result.warnings == [
        "swap_config.layer_swap[0]: the output of layer 1 is not swapped with the layer: the layer after it reads it "
        "and is recomputed"
    ]
    norm = {"select_recompute": {"attention_norm": [1]}}
    assert len(resolve(norm, swap, num_layers=3).warnings) == 2  # the output of layer 0, and the norm itself in layer 1
