"""The rules of the two sections said a second time, from their description, without a line of lowtide.

What: `expected(...)` takes the sections as Python values and gives tables and, layer by layer, what is recomputed and
swapped. Counts are dealt by listing a stage's layers in the order of the rounds; patterns are held against the list of
all paths of a layer; recompute against swap is decided on sets of operators.
Not covered: what upstream hangs or crashes on (test_traps.py), aliases, log lines, warnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LEGACY_DEFAULTS = [r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"]
COMM_DEFAULTS = [r".*\.norm"]
SWAP_DEFAULT = r".*\.flash_attention"


@dataclass
class Layer:
    full: bool = False
    ops: set[str] = field(default_factory=set)
    comm: set[str] = field(default_factory=set)
    exclude: set[str] = field(default_factory=set)
    comm_exclude: set[str] = field(default_factory=set)
    swap: dict[str, int] = field(default_factory=dict)
    holes: dict[str, set[str]] = field(default_factory=dict)


@dataclass
class Model:
    """Layers of each [chunk][stage], and every path of a layer: True for an operator."""

    cells: list[list[list[int]]]
    paths: dict[str, bool]

    @property
    def layers(self) -> list[int]:
        return [layer for row in self.cells for cell in row for layer in cell]


def paths_of(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, bool]]:
    for name, below in tree.items():
        yield above + name, below is None
        yield from paths_of(below or {}, f"{above}{name}.")


def model_of(sizes: list[list[int]], tree: dict[str, Any]) -> Model:
    numbers = iter(range(sum(map(sum, sizes))))
    return Model([[[next(numbers) for _ in range(size)] for size in row] for row in sizes], dict(paths_of(tree)))


def counted(value: Any, model: Model) -> set[int]:
    """Layers that a value selects while numbers are counts."""
    if isinstance(value, bool):
        return set(model.layers) if value else set()
    chosen: set[int] = set()
    if all(isinstance(item, bool | int) for item in value):
        for stage, count in enumerate(value):
            of_stage = [row[stage] for row in model.cells]
            rounds = sorted(
                (turn, chunk, layer) for chunk, cell in enumerate(of_stage) for turn, layer in enumerate(cell)
            )
            in_turn = [layer for _, _, layer in rounds]
            chosen.update(in_turn if count is True else in_turn[: int(count)])
        return chosen
    for row, cells in zip(value, model.cells, strict=True):
        for count, cell in zip([row] * len(cells) if isinstance(row, bool) else row, cells, strict=True):
            chosen.update(cell if count is True else cell[: int(count)])
    return chosen


def indexed(value: Any, model: Model) -> set[int]:
    """Layers that a value selects while swap is on."""
    if isinstance(value, bool):
        return set(model.layers) if value else set()
    return {int(index) for index in value} & set(model.layers)


def table(chosen: set[int], model: Model) -> list[list[int]]:
    return [[len(chosen & set(cell)) for cell in row] for row in model.cells]


def named(pattern: str, model: Model) -> list[str]:
    """Paths that a pattern names."""
    parts = pattern.split(r"\.")
    return [
        path
        for path in model.paths
        if len(pieces := path.split(".")) == len(parts) and all(map(re.fullmatch, parts, pieces))
    ]


def by_pattern(value: Any, defaults: list[str], choose: Any) -> dict[str, set[int]]:
    if isinstance(value, dict):
        return {pattern: choose(below) for pattern, below in value.items()}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return {pattern: choose(True) for pattern in value}
    return {pattern: choose(value) for pattern in defaults}


def same_shape(one: str, other: str) -> bool:
    a, b = one.split(r"\."), other.split(r"\.")
    return len(a) == len(b) and all(re.fullmatch(x, y) or re.fullmatch(y, x) for x, y in zip(a, b, strict=True))


def expected(recompute: dict[str, Any], swap: dict[str, Any] | None, model: Model) -> tuple[dict, list[Layer]]:
    is_on = bool(swap and swap.get("swap"))

    def count(value: Any) -> set[int]:
        return counted(value, model)

    def choose(value: Any) -> set[int]:
        return indexed(value, model) if is_on else count(value)

    full = choose(recompute.get("recompute", False))
    select = by_pattern(recompute.get("select_recompute", False), LEGACY_DEFAULTS, choose)
    comm = by_pattern(recompute.get("select_comm_recompute", False), COMM_DEFAULTS, choose)
    exclude = by_pattern(recompute.get("select_recompute_exclude", False), [], count)
    comm_exclude = by_pattern(recompute.get("select_comm_recompute_exclude", False), [], count)
    for selected, excluded in ((select, exclude), (comm, comm_exclude)):
        for pattern in excluded:
            twin = next((name for name in selected if same_shape(name, pattern)), None)
            if twin is not None:
                del selected[twin]
    layers = []
    for index in model.layers:
        layer = Layer(full=index in full)

        def names(rules: dict[str, set[int]], *, only_operators: bool, index: int = index) -> set[str]:
            found = {path for pattern, chosen in rules.items() if index in chosen for path in named(pattern, model)}
            return {path for path in found if model.paths[path]} if only_operators else found

        if not is_on:
            layer.exclude = names(exclude, only_operators=True)
            layer.comm_exclude = names(comm_exclude, only_operators=True)
        if not layer.full:
            layer.ops = names(select, only_operators=False) - layer.exclude
            layer.comm = names(comm, only_operators=True) - layer.comm_exclude
        if is_on:
            assert swap is not None
            _swap(layer, index, swap, model)
        layers.append(layer)
    tables: dict[str, Any] = {"layer_recompute": table(full, model)}
    if not is_on:
        every = {"select_recompute": select, "select_comm_recompute": comm}
        every |= {"select_recompute_exclude": exclude, "select_comm_recompute_exclude": comm_exclude}
        for key, rules in every.items():
            tables[key] = {pattern: table(chosen, model) for pattern, chosen in rules.items()}
    return tables, layers


def _swap(layer: Layer, index: int, swap: dict[str, Any], model: Model) -> None:
    """Fill in what is swapped: asked for, less what is recomputed."""
    layer_entries, op_entries = swap.get("layer_swap"), swap.get("op_swap")
    if layer_entries is None and op_entries is None:
        op_entries = [{"op_name": SWAP_DEFAULT, "backward_prefetch": swap.get("default_prefetch", 1), "layers": True}]

    def applies(entry: dict[str, Any]) -> bool:
        return entry["layers"] is True or (entry["layers"] is not False and index in entry["layers"])

    asked: dict[str, int] = {}
    for entry in layer_entries or []:
        if applies(entry):
            asked["<layer>"] = entry["backward_prefetch"]
            break
    spread = [
        (name, entry)
        for entry in op_entries or []
        for name in ([entry["op_name"]] if isinstance(entry["op_name"], str) else entry["op_name"])
    ]
    for pattern in dict.fromkeys(name for name, _ in spread):
        entry = next((entry for name, entry in spread if name == pattern and applies(entry)), None)
        for path in named(pattern, model) if entry else ():
            asked[path] = entry["backward_prefetch"]
    every = {path for path, is_op in model.paths.items() if is_op or not _below(path, model)}
    gone = every if layer.full else {op for part in layer.ops for op in _operators(part, model)}
    for target, prefetch in asked.items():
        own = every if target == "<layer>" else _operators(target, model)
        if layer.full or own <= gone:
            continue
        layer.swap[target] = prefetch
        inside = {part for part in layer.ops if target == "<layer>" or part.startswith(f"{target}.")}
        if inside:
            layer.holes[target] = inside


def _below(path: str, model: Model) -> list[str]:
    return [other for other in model.paths if other.startswith(f"{path}.")]


def _operators(path: str, model: Model) -> set[str]:
    return {other for other in _below(path, model) if model.paths[other]} or {path}
