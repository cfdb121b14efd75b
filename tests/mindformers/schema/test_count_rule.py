"""The rule of counts, said a second time in other words, against the implementation on random configurations."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sections import resolve


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int, int, list[list[int]]]:
    """(num_layers, stages, chunks, offset) where every stage has a layer."""
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = [[draw(st.integers(1, 6)) for _ in range(stages)] for _ in range(chunks)]
    total = sum(map(sum, sizes))
    average = total // (stages * chunks)
    return total, stages, chunks, [[size - average for size in row] for row in sizes]


def cells(num_layers: int, offset: list[list[int]]) -> list[list[list[int]]]:
    """The layers of each [chunk][stage], by walking over all layers."""
    average = num_layers // (len(offset) * len(offset[0]))
    layers = iter(range(num_layers))
    return [[[next(layers) for _ in range(average + extra)] for extra in row] for row in offset]


def full(value: Any, grid: tuple[int, int, int, list[list[int]]]) -> set[int]:
    num_layers, stages, chunks, offset = grid
    config = {"recompute": value}
    result = resolve(config, num_layers=num_layers, pipeline_stage=stages, pp_interleave_num=chunks, offset=offset)
    counted = result.normalized["layer_recompute"]
    selected = {layer.index for layer in result.layers if layer.full_recompute}
    assert sum(map(sum, counted)) == len(selected)
    layout = cells(num_layers, offset)
    for layer in result.layers:
        assert layer.index in layout[layer.chunk][layer.stage]
    return selected


counts = st.one_of(st.integers(0, 30), st.booleans())


@settings(max_examples=150, deadline=None)
@given(grid=grids(), data=st.data())
def test_counts_per_cell(grid: tuple[int, int, int, list[list[int]]], data: st.DataObject) -> None:
    _, stages, chunks, offset = grid
    value = [[data.draw(counts) for _ in range(stages)] for _ in range(chunks)]
    expected: set[int] = set()
    for row, layers_of_row in zip(value, cells(grid[0], offset), strict=True):
        for count, layers in zip(row, layers_of_row, strict=True):
            expected |= set(layers if count is True else [] if count is False else layers[:count])
    assert full(value, grid) == expected


@settings(max_examples=100, deadline=None)
@given(num_layers=st.integers(1, 12), data=st.data())
def test_with_swap_numbers_are_indices(num_layers: int, data: st.DataObject) -> None:
    layers = st.lists(st.integers(0, num_layers - 1), unique=True)
    full_layers, swapped, op_layers = data.draw(layers), data.draw(layers), data.draw(layers)
    swap = {
        "swap": True,
        "layer_swap": [{"backward_prefetch": 3, "layers": swapped}],
        "op_swap": [{"op_name": "attention", "backward_prefetch": 5, "layers": op_layers}],
    }
    result = resolve({"recompute": full_layers}, swap, num_layers=num_layers)
    for layer in result.layers:
        assert layer.full_recompute == (layer.index in full_layers)
        expected = {"<layer>": 3} if layer.index in swapped else {}
        expected |= {"attention": 5} if layer.index in op_layers else {}
        assert layer.swap_ops == ({} if layer.full_recompute else expected)
