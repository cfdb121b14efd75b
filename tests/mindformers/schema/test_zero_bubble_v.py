"""A pipeline whose second chunk comes back: the second row of a table is written by stage, and read the other way
round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Resolution, read_sections
from tests.support.sections import resolve

OFFSET = [[0, 1], [1, 0]]
"""10 layers, 2 to a cell: stage 0 has layers 0-1 and 7-9, stage 1 has 2-4 and 5-6."""


def resolved(recompute: object, **others: Any) -> Resolution:
    settings: dict[str, Any] = {"num_layers": 10, "pipeline_stage": 2, "pp_interleave_num": 2, "offset": OFFSET}
    return resolve({"recompute": recompute}, zero_bubble_v=True, **settings | others)


def recomputed(resolution: Resolution) -> list[int]:
    return [layer.index for layer in resolution.layers if layer.full_recompute]


def refusal(recompute: object, **others: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolved(recompute, **others)
    return str(error.value)


def test_layers_go_down_and_come_back() -> None:
    resolution = resolved(False)
    assert resolution.num_layers_per_stage == [[2, 3], [2, 3]]  # upstream prints the second row turned round
    cells = [(layer.chunk, layer.stage) for layer in resolution.layers]
    assert cells == [(0, 0)] * 2 + [(0, 1)] * 3 + [(1, 1)] * 2 + [(1, 0)] * 3


def test_the_second_row_is_that_of_the_stages() -> None:
    resolution = resolved([[1, 0], [2, 1]])
    assert recomputed(resolution) == [0, 5, 7, 8]
    assert resolution.normalized["layer_recompute"] == [[1, 0], [1, 2]]
    assert recomputed(resolved([True, [0, 9]])) == [0, 1, 2, 3, 4, 5, 6]
    assert recomputed(resolved(True)) == list(range(10))


def test_without_it_the_same_file_means_something_else() -> None:
    settings: dict[str, Any] = {"num_layers": 10, "pipeline_stage": 2, "pp_interleave_num": 2, "offset": OFFSET}
    assert recomputed(resolve({"recompute": [[1, 0], [2, 1]]}, **settings)) == [0, 5, 6, 8]


def test_ops_are_counted_the_same_way() -> None:
    resolution = resolve(
        {"select_recompute": {r"feed_forward\.mul": [[0, 1], [1, 0]]}},
        num_layers=10,
        pipeline_stage=2,
        pp_interleave_num=2,
        offset=OFFSET,
        zero_bubble_v=True,
    )
    assert [layer.index for layer in resolution.layers if layer.recompute_ops] == [2, 7]


def test_what_upstream_crashes_on_is_refused() -> None:
    words = (
        "recompute_config.recompute: must be true, false or 2 rows [chunk][stage] with zero_bubble_v, whose second row "
        "comes back, not "
    )
    assert refusal([1, 2]) == f"{words}[1, 2]"
    assert refusal([True, False]) == f"{words}[True, False]"
    assert refusal([[1, 2]]) == f"{words}[[1, 2]]"
    assert refusal(True, pp_interleave_num=1, offset=0) == (
        "pp_interleave_num: must be 2 with zero_bubble_v, which has 2 chunks a stage, not 1"
    )


def test_a_file_says_it_by_its_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "parallel_config: {pipeline_stage: 2}\n"
        "parallel:\n  pipeline_config: {pipeline_interleave: true, pipeline_scheduler: zero_bubble_v}\n"
        "model:\n  model_config: {num_layers: 10, pp_interleave_num: 2, offset: [[0, 1], [1, 0]]}\n"
        "recompute_config:\n  recompute: [[1, 0], [2, 1]]\n"
    )
    assert recomputed(read_sections(path).resolve()) == [0, 5, 7, 8]
    path.write_text(path.read_text().replace("[[1, 0], [2, 1]]", "[1, 2]"))
    with pytest.raises(ConfigError) as error:
        read_sections(path).resolve()
    assert str(error.value) == (
        f"{path}:7:14: 'recompute_config.recompute' must be true, false or 2 rows [chunk][stage] with zero_bubble_v, "
        "whose second row comes back, not [1, 2]"
    )
