"""`recompute_config` into tables: which layers each kind of recompute covers.

Two readings of the same keys. Without swap a number is a *count*: how many layers of a stage, from its first one on.
With `swap: true` a number is the *index* of a layer. Both end as one `Selection` per pattern, in the shape that
MindSpore Transformers prints, so that its log lines can be compared.

What a value may be, in the reading as counts:

    true / false          every layer / none
    [2, 1]                per stage, dealt to the chunks of a stage in turn; true is the whole stage
    [[2, 1], [1, 0]]      [chunk][stage], each cut to what the cell holds; true for a cell or a whole row

and for `select_*` also a list of op names (every layer) or a mapping of op names to any of the above.
Not covered: which ops a pattern names (names.py).

Counts of layers: `true`, a number for each stage, or a table `[chunk][stage]`, as one table.

Where a form is refused or read otherwise than it looks, the message says so (issues.py).
Not covered: layer indices, which numbers are while swap is on (recompute.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lowtide.config.source import join_path
from lowtide.mindformers.schema.grid import Grid, Table
from lowtide.mindformers.schema.issues import Issues
from lowtide.mindformers.schema.names import looks_like


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads what stands behind a key, for one grid."""

    grid: Grid
    issues: Issues

    def patterns(self, value: Any, path: str, defaults: tuple[str, ...], *, by_index: bool) -> dict[str, Selection]:
        if isinstance(value, Mapping):
            for name in value:
                if not isinstance(name, str):
                    self.issues.refuse(path, f"must map op names to layers, but {name!r} is not a name")
            named = {name: (below, join_path(path, name), False) for name, below in value.items()}
        elif isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            if by_index and value:
                example = f"{{{value[0]!r}: [0, 1]}}"
                self.issues.refuse(path, f"must say for each op which layers while swap is on; write {example}")
            named = {name: (True, join_path(path, index), False) for index, name in enumerate(value)}
        else:
            named = dict.fromkeys(defaults, (value, path, True))
            if not by_index and len(defaults) > 1:
                self.check_shared(value, path)
            self.selection(value, path, by_index=by_index)  # refuses a wrong value even where there are no defaults
        return {
            name: self.selection(below, where, by_index=by_index, is_default=is_default, of_op=not is_default)
            for name, (below, where, is_default) in named.items()
        }

    def selection(
        self,
        value: Any,
        path: str,
        *,
        by_index: bool,
        is_default: bool = False,
        of_op: bool = False,
    ) -> Selection:
        if by_index:
            shown: Any = self._indices(value, path, of_op=of_op)
            return Selection(shown=shown, path=path, is_default=is_default)
        shown = self.table(value, path)
        as_logged = as_logged_by_upstream(value, shown)
        return Selection(shown=shown, grid=self.grid, path=path, is_default=is_default, as_logged=as_logged)

    # ---- indices (swap is on)

    def _indices(self, value: Any, path: str, *, of_op: bool) -> list[int] | bool:
        every = f"[{', '.join(map(str, range(self.grid.num_layers)))}]" if self.grid.num_layers <= 8 else "[0, 1, ...]"
        if isinstance(value, bool):
            if of_op:
                self.issues.tolerate(path, f"{str(value).lower()}_for_one_op", every=every)
            return value or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            forms = "true, false or a list of layer indices such as [0, 3]"
            hint = f"; write {list(value)}" if isinstance(value, tuple) else ""
            self.issues.refuse(path, f"must be {forms} while swap is on, not {value!r}{hint}")
        if value and all(isinstance(item, bool) for item in value):
            self.issues.tolerate(path, "booleans_as_indices")
        check_indices(value, path, self.grid.num_layers, self.issues)
        if value:
            self.issues.note(f"swap is on, so numbers are layer indices: {path} = {value}")
        return list(value)

    # ---- counts (swap is off)

    def table(self, value: Any, path: str) -> Table:
        """The table of a value in any form."""
        if isinstance(value, bool):
            return self.grid.table() if value else self.grid.zeros()
        if not isinstance(value, list | tuple):
            self._illegal(path, value)
        if self.grid.comes_back:
            value = self._turned(value, path)
        if all(isinstance(item, int) for item in value):
            return self._per_stage(value, path)
        if all(isinstance(item, str) for item in value):
            self.issues.tolerate(path, "names_for_counts")
            return self.grid.table()
        if all(isinstance(row, bool | list | tuple) for row in value):
            return self._per_cell(value, path)
        self._illegal(path, value)

    def _turned(self, value: Any, path: str) -> Any:
        """With zero_bubble_v, the table with its second row in the order of layers. Upstream turns it round before it
        looks at it, and crashes on whatever has no second row."""
        if all(isinstance(item, str) for item in value):
            return value
        if len(value) < 2 or not isinstance(value[1], list | tuple):
            self.issues.refuse(
                path,
                f"must be true, false or 2 rows [chunk][stage] with zero_bubble_v, whose second row comes back, not "
                f"{value!r}",
            )
        return [value[0], value[1][::-1], *value[2:]]

    def _per_stage(self, value: Any, path: str) -> Table:
        num_stages = self.grid.num_stages
        if len(value) > num_stages:
            self.issues.refuse(path, f"has {len(value)} counts for {_of(num_stages, 'stage')}; write one per stage")
        if isinstance(value, tuple) and any(isinstance(item, bool) for item in value):
            self.issues.tolerate(path, "tuples", value=value)
        if value and self.grid.num_chunks > 1 and all(isinstance(item, bool) for item in value):
            self.issues.tolerate(path, "stages_or_chunks", booleans=_of(len(value), "boolean"))
        counts = []
        for stage, item in enumerate(value):
            total = self.grid.stage_total(stage)
            where = join_path(path, stage)
            if isinstance(item, bool):
                counts.append(total if item else 0)
                continue
            if item < 0:
                self.issues.tolerate(where, "stage_below_0", count=item)
            elif item > total:
                self._clipped(where, item, total)
            counts.append(item)
        return self.grid.deal(counts)

    def _per_cell(self, value: Any, path: str) -> Table:
        num_chunks, num_stages = self.grid.num_chunks, self.grid.num_stages
        is_short = len(value) < num_chunks
        table: Table = []
        if len(value) > num_chunks:
            self.issues.refuse(path, f"has {len(value)} rows for {_of(num_chunks, 'chunk')}; write one per chunk")
        if any(isinstance(row, tuple) and row for row in value) or (
            isinstance(value, tuple) and any(isinstance(row, bool) for row in value)
        ):
            self.issues.tolerate(path, "tuples", value=value)
        for chunk, row in enumerate(value):
            where = join_path(path, chunk)
            sizes = self.grid.sizes[chunk]
            if isinstance(row, bool):
                table.append(list(sizes) if row else [0] * num_stages)
                continue
            if len(row) > num_stages:
                self.issues.refuse(where, f"has {len(row)} counts for {_of(num_stages, 'stage')}; write one per stage")
            is_short = is_short or len(row) < num_stages
            cells = enumerate(zip(row, sizes, strict=False))
            table.append([self._cell(item, size, join_path(where, stage)) for stage, (item, size) in cells])
        if is_short:
            whole: dict[str, object] = {"num_chunks": num_chunks, "num_stages": num_stages}
            whole |= {"chunks": _of(num_chunks, "chunk"), "stages": _of(num_stages, "stage")}
            self.issues.tolerate(path, "table_too_small", **whole)
        return table

    def _cell(self, item: Any, size: int, path: str) -> int:
        if isinstance(item, bool):
            return size if item else 0
        if not isinstance(item, int):
            self._illegal(path, item)
        if item < 0:
            self.issues.tolerate(path, "cell_below_0", count=item)
        elif item > size:
            self._clipped(path, item, size)
        return min(item, size)

    def check_shared(self, value: Any, path: str) -> None:
        """Upstream rewrites one table in place for each default op, and refuses its own result for the second one."""
        if not isinstance(value, list | tuple) or not any(isinstance(row, list | tuple) for row in value):
            return
        rows = [(row, sizes) for row, sizes in zip(value, self.grid.sizes, strict=False)]
        if any(
            isinstance(row, bool)
            or any(isinstance(item, bool) or (isinstance(item, int) and item > size) for item, size in zip(row, sizes))
            for row, sizes in rows
            if isinstance(row, bool | list | tuple)
        ):
            self.issues.tolerate(path, "default_table_rewritten")

    def _clipped(self, path: str, count: int, size: int) -> None:
        self.issues.warn(path, f"asks for {_of(count, 'layer')} of {size}; read as {size}")

    def _illegal(self, path: str, value: Any) -> NoReturn:
        hint = ""
        if isinstance(value, str) and value.startswith("("):
            hint = "; a tuple cannot be written in YAML, use [ ]"
        elif value is None:
            hint = "; write false to switch it off"
        elif isinstance(value, int):
            hint = f"; write [{value}] for a count per stage"
        forms = "true, false, a count per stage such as [2, 1], or counts [chunk][stage] such as [[2, 1], [1, 0]]"
        self.issues.refuse(path, f"must be {forms}, not {value!r}{hint}")


def as_logged_by_upstream(value: Any, table: Table) -> str:
    """Upstream works on the table as it was written: a tuple stays one, and `true` becomes a row of numpy's."""
    is_rows = isinstance(value, list | tuple) and any(isinstance(row, list | tuple) for row in value)
    if not is_rows or not (isinstance(value, tuple) or any(row is True for row in value)):
        return ""
    rows = [
        f"array({counts}, dtype=int32)" if row is True else str(counts)
        for row, counts in zip(value, table, strict=False)
    ]
    text = ", ".join(rows)
    return f"({text})" if isinstance(value, tuple) else f"[{text}]"


def _of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


SELECT_KEYS = ("select_recompute", "select_comm_recompute", "select_recompute_exclude", "select_comm_recompute_exclude")
FLAG_KEYS = ("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation")
KEYS = ("recompute", *SELECT_KEYS, *FLAG_KEYS)
ROOT = "recompute_config"

_DEFAULT_OPS = {
    "legacy": (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"),
    "mcore": (
        r"mlp\.shared_experts\.mul",
        r"mlp\.shared_experts\.activation_func\.silu",
        r"mlp\.mul",
        r"mlp\.activation_func\.silu",
    ),
}
_DEFAULT_COMM_OPS = (r".*\.norm",)


Prefetch = int | str
"""Operators ahead of the first reader; `Auto` is upstream's word for 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Where one pattern, or recompute or swap of whole layers, applies."""

    shown: Table | list[int] | bool
    """As upstream prints it: a table of counts, a list of indices, or `True`."""
    grid: Grid | None = None
    """None: `shown` names layers; else it counts them."""
    path: str
    prefetch: Prefetch = 1
    """Of a swap."""
    is_default: bool = False
    """The pattern is from the built-in list, not written by the user."""
    as_logged: str = ""
    """Where upstream's log line has another type in it: a tuple, or an array for the row that `true` stands for."""

    @property
    def log_text(self) -> str:
        return self.as_logged or str(self.shown)

    def covers(self, layer: int) -> bool:
        if isinstance(self.shown, bool):
            return self.shown
        if self.grid is None:
            return layer in self.shown
        return self.grid.selects(self.shown, layer)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """`recompute_config`, read."""

    full: Selection
    by_key: Mapping[str, dict[str, Selection]]
    """The four `select_*` keys: pattern -> where it applies."""
    removed: tuple[tuple[str, str], ...]
    """(key, pattern) that an exclude took out, in the order in which it happened."""
    takes_modules: bool = False
    """All keys take modules and act while swap is on, as in the newer schema."""
    regathers: bool | None = None
    """`parallel_optimizer_comm_recompute`; None: not written."""
    slices_inputs: bool = False
    """`recompute_slice_activation`, where it has an effect."""
    keeps_collectives: bool = False
    """`mp_comm_recompute: false`, where it has an effect."""

    def normalized(self) -> dict[str, Any]:
        tables: dict[str, Any] = {"layer_recompute": self.full.shown}
        for key, selections in self.by_key.items():
            tables[key] = {pattern: selection.shown for pattern, selection in selections.items()}
        return tables

    def log_texts(self) -> dict[str, str]:
        """The same tables as upstream's log lines write them."""
        texts = {"layer_recompute": self.full.log_text}
        for key, selections in self.by_key.items():
            entries = [f"{pattern!r}: {selection.log_text}" for pattern, selection in selections.items()]
            texts[key] = f"{{{', '.join(entries)}}}"
        return texts


def read_recompute(config: object, grid: Grid, *, swap: bool, family: str, issues: Issues) -> Recompute:
    """Check and normalise `recompute_config`. `swap`: numbers are indices. `family` decides the default op list."""
    values = _values(config, issues)
    reader = _Reader(grid=grid, issues=issues)
    full = reader.selection(values["recompute"], f"{ROOT}.recompute", by_index=swap)
    by_key: dict[str, dict[str, Selection]] = {}
    for key in SELECT_KEYS:
        is_exclude = key.endswith("_exclude")
        defaults = () if is_exclude else _DEFAULT_COMM_OPS if "comm" in key else _DEFAULT_OPS[family]
        by_key[key] = reader.patterns(values[key], f"{ROOT}.{key}", defaults, by_index=swap and not is_exclude)
        if is_exclude and values[key] and not by_key[key]:
            issues.note(f"no effect: {ROOT}.{key}, because it names no op; write the names of ops to keep")
    slices_inputs, keeps_collectives = _flags(
        values, any(full.covers(layer) for layer in range(grid.num_layers)), issues
    )
    removed = [
        *_remove_excluded(by_key, "select_recompute", grid, issues),
        *_remove_excluded(by_key, "select_comm_recompute", grid, issues),
    ]
    for key in SELECT_KEYS[2:]:
        if swap and by_key[key]:
            issues.tolerate(f"{ROOT}.{key}", "exclude_beside_swap", key=key.removesuffix("_exclude"))
    key = "parallel_optimizer_comm_recompute"
    is_written = isinstance(config, Mapping) and key in config
    return Recompute(
        full=full,
        by_key=by_key,
        removed=tuple(removed),
        regathers=values[key] if is_written else None,
        slices_inputs=slices_inputs,
        keeps_collectives=keeps_collectives,
    )


def _values(config: object, issues: Issues) -> dict[str, Any]:
    """All keys with their defaults."""
    values: dict[str, Any] = {"recompute": False, **dict.fromkeys(SELECT_KEYS, False)}
    values |= {key: key == "mp_comm_recompute" for key in FLAG_KEYS}
    written: Any = {"recompute": config} if isinstance(config, bool) else config
    values.update(issues.mapping(written, ROOT, KEYS))
    for key in FLAG_KEYS:
        issues.switch(values[key], f"{ROOT}.{key}")
    return values


def _flags(values: Mapping[str, Any], has_full: bool, issues: Issues) -> tuple[bool, bool]:
    """Notes about the flags; whether inputs of recomputed layers are sliced, and what their collectives give is kept.
    `has_full`: there are such layers."""
    keeps = not values["mp_comm_recompute"]
    slices = bool(values["recompute_slice_activation"])
    if not has_full:
        for key in ("recompute_slice_activation", "parallel_optimizer_comm_recompute"):
            if values[key]:
                issues.note(f"no effect: {ROOT}.{key}, because no layer is recomputed as a whole")
        slices = False
    elif slices and issues.compat and values["recompute"] is not True:
        issues.note(f"no effect: {ROOT}.recompute_slice_activation, because upstream drops it unless recompute is true")
        slices = False
    if keeps and (not has_full or issues.compat):
        why = "upstream does not apply it to these layers either" if has_full else "no layer is recomputed as a whole"
        issues.note(f"no effect: {ROOT}.mp_comm_recompute, because {why}")
        keeps = False
    return slices, keeps


def check_indices(indices: list[int], path: str, num_layers: int, issues: Issues) -> None:
    """Layer indices that do not exist: upstream skips them without a word."""
    for position, index in enumerate(indices):
        if not 0 <= index < num_layers:
            issues.tolerate(join_path(path, position), "no_such_layer", index=index, last=num_layers - 1)


def _remove_excluded(by_key: dict[str, dict[str, Selection]], key: str, grid: Grid, issues: Issues) -> list[Any]:
    """An exclude takes the first selecting pattern that looks the same out of the selection, for every layer."""
    selected, removed = by_key[key], []
    for pattern, exclude in by_key[f"{key}_exclude"].items():
        twin = next((name for name in selected if looks_like(name, pattern)), None)
        if twin is None:
            continue
        selection = selected.pop(twin)
        removed.append((key, twin))
        lost = [layer for layer in range(grid.num_layers) if selection.covers(layer) and not exclude.covers(layer)]
        if twin != pattern and any(selection.covers(layer) for layer in range(grid.num_layers)):
            issues.tolerate(exclude.path, "exclude_takes_pattern", pattern=twin, key=key)
        elif lost:
            issues.tolerate(exclude.path, "exclude_takes_layers", pattern=twin, key=key)
    return removed
