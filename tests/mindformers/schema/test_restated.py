"""Random configurations, against the rules as restated.py says them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.mindformers.schema import Resolution
from tests.mindformers.schema.restated import Layer, Model, expected, model_of
from tests.support.sections import resolve

TREE = json.loads((Path(__file__).parent / "cases" / "upstream_trees.json").read_text())["llama_legacy"]
PATTERNS = [
    "attention",
    "attention_norm",
    "feed_forward",
    "add",
    r"attention\.wq",
    r"attention\.flash_attention",
    r"attention\.w[qk]\.matmul",
    r"attention_norm\.norm",
    r".*\.norm",
    r"feed_forward\.mul",
    r"feed_forward\.m.l",
    r"feed_forward\.w\d\.matmul",
    r"feed_forward\.w1",
    r"feed_forward\.w1\.activation\.silu",
    r"feed_forward\.(w2|w3)\.(matmul|reshape)",
    r"nothing\.here",
    r"Feed_forward\.mul",
]
PREFETCHES = st.integers(1, 30)


@st.composite
def grids(draw: st.DrawFn) -> list[list[int]]:
    stages, chunks = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return [[draw(st.integers(1, 3)) for _ in range(stages)] for _ in range(chunks)]


def counts(draw: st.DrawFn, sizes: list[list[int]]) -> Any:
    """Any of the forms, with numbers that may be larger than there are layers."""
    stages, chunks = len(sizes[0]), len(sizes)
    item = st.one_of(st.integers(0, 12), st.booleans())
    kind = draw(st.sampled_from(["bool", "stages", "table", "rows"]))
    if kind == "bool":
        return draw(st.booleans())
    if kind == "stages":
        return draw(st.lists(item, max_size=stages))
    row = st.lists(item, min_size=stages, max_size=stages)
    table = [draw(st.one_of(row, st.booleans()) if kind == "rows" else row) for _ in range(chunks)]
    return table if any(isinstance(row, list) for row in table) else [*table[:-1], [1] * stages]


@st.composite
def problems(draw: st.DrawFn, *, swap: bool) -> tuple[list[list[int]], dict[str, Any], dict[str, Any] | None]:
    sizes = draw(grids())
    indices = st.lists(st.integers(-2, sum(map(sum, sizes)) + 2), max_size=5)

    def value() -> Any:
        return draw(st.one_of(st.booleans(), indices)) if swap else counts(draw, sizes)

    def selection(*, by_index: bool) -> Any:
        kind = draw(st.sampled_from(["absent", "default", "names", "mapping"]))
        chosen = draw(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=4, unique=True))
        if kind == "names" and not by_index:
            return chosen
        if kind == "mapping":
            return {pattern: draw(indices) if by_index else counts(draw, sizes) for pattern in chosen}
        if kind == "default":
            return draw(st.booleans()) if not by_index else value()
        return False

    recompute: dict[str, Any] = {"recompute": value() if draw(st.booleans()) else False}
    recompute["select_recompute"] = selection(by_index=swap)
    recompute["select_comm_recompute"] = selection(by_index=swap)
    for key in ("select_recompute_exclude", "select_comm_recompute_exclude"):
        if draw(st.integers(0, 2)) == 0:
            recompute[key] = selection(by_index=False)
    if not swap:
        return sizes, recompute, draw(st.sampled_from([None, {"swap": False}]))
    section: dict[str, Any] = {"swap": True}
    if draw(st.booleans()):
        section["default_prefetch"] = draw(PREFETCHES)
    layers = st.one_of(indices, st.just(False))
    if draw(st.booleans()):
        section["layer_swap"] = [
            {"backward_prefetch": draw(PREFETCHES), "layers": draw(layers)} for _ in range(draw(st.integers(0, 3)))
        ]
    if draw(st.booleans()):
        names = st.one_of(st.sampled_from(PATTERNS), st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2))
        section["op_swap"] = [
            {"op_name": draw(names), "backward_prefetch": draw(PREFETCHES), "layers": draw(layers)}
            for _ in range(draw(st.integers(0, 4)))
        ]
    return sizes, recompute, section


def resolved(sizes: list[list[int]], recompute: Any, swap: Any) -> tuple[Resolution, Model]:
    num_layers, cells = sum(map(sum, sizes)), len(sizes) * len(sizes[0])
    offset = [[size - num_layers // cells for size in row] for row in sizes]
    grid = {"pipeline_stage": len(sizes[0]), "pp_interleave_num": len(sizes), "offset": offset}
    return resolve(recompute, swap, num_layers=num_layers, names=TREE, **grid), model_of(sizes, TREE)


def assert_same(result: Resolution, layers: list[Layer]) -> None:
    assert len(result.layers) == len(layers)
    for got, want in zip(result.layers, layers, strict=True):
        assert got.full_recompute == want.full
        assert set(got.recompute_ops) == want.ops
        assert set(got.comm_recompute_ops) == want.comm
        assert set(got.recompute_exclude_ops) == want.exclude
        assert set(got.comm_recompute_exclude_ops) == want.comm_exclude
        assert got.swap_ops == want.swap
        assert {part: set(holes) for part, holes in got.swap_holes.items()} == want.holes


@settings(max_examples=150, deadline=None)
@given(problem=problems(swap=False))
def test_counts(problem: Any) -> None:
    result, model = resolved(*problem)
    tables, layers = expected(problem[1], problem[2], model)
    assert {key: result.normalized[key] for key in tables} == tables
    assert_same(result, layers)


@settings(max_examples=150, deadline=None)
@given(problem=problems(swap=True))
def test_indices_and_swap(problem: Any) -> None:
    result, model = resolved(*problem)
    _, layers = expected(problem[1], problem[2], model)
    assert_same(result, layers)
