"""Cases recorded from MindSpore Transformers give the same here; see upstream.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.mindformers import resolve
from lowtide.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from upstream import misses

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


@pytest.mark.parametrize("pattern", ["(a+)+", r"feed_forward\.(m*u*)*l", "((.*)_)*x"])
def test_an_expression_that_may_never_end(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"select_recompute": [pattern]}, num_layers=1)
    assert str(caught.value) == (
        "recompute_config.select_recompute[0]: repeats what itself repeats, as '(a+)+' does, which can take for ever; "
        f"write names with '\\.' between the levels: {pattern!r}"
    )


@pytest.mark.parametrize("pattern", ["(a|b)+", r".*\.norm", "a{2,3}b*", "(w[qkv])+"])
def test_one_repetition_is_fine(pattern: str) -> None:
    assert len(resolve({"select_recompute": [pattern]}, num_layers=1).layers) == 1
