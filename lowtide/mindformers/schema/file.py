"""The two sections out of a YAML file that has them beside others: a run file of lowtide's or one of upstream's.

What: `read_sections("run.yaml")` finds `recompute_config` and `swap_config`, and the numbers they need wherever the
file has them: layers, offset and chunks below `model` (or `model.model_config`), stages in `parallel_config`. `load`
resolves them at once; an argument wins over the file.
Strict or compat: `compat: true` or `false` in the file says it; without it a run file of lowtide's (with `train`,
`data` or `model.model_type`) is strict, and a file of upstream's is compat.
Why the words differ from lowtide's own files: upstream reads YAML 1.1, so `True`, `yes` and `on` are true here, too.
Not covered: what else upstream's file says; those keys are named in one note and not looked at.

`Sections.resolve` gives the tables as MindSpore Transformers normalises them, its log lines, and for every layer what
is recomputed and what is swapped, with recompute winning over swap. Where `log_lines` and `layers` differ, the lines
follow upstream, `layers` is what happens, and `warnings` says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.config.source import MOST_DIGITS, RawValue, join_path, read_yaml, too_many_digits
from lowtide.errors import ConfigError, did_you_mean
from lowtide.mindformers.schema.aliases import family_of
from lowtide.mindformers.schema.grid import Grid, make_grid
from lowtide.mindformers.schema.issues import Issues, is_foreign, layers_text
from lowtide.mindformers.schema.layers import (
    Resolution,
    Work,
    head_lines,
    report_lost,
    report_nothing,
    report_patterns,
)
from lowtide.mindformers.schema.names import Names, trees_of
from lowtide.mindformers.schema.newer import is_newer, read_newer
from lowtide.mindformers.schema.recompute import read_recompute
from lowtide.mindformers.schema.swap import read_swap

SECTIONS = ("recompute_config", "swap_config")
_OURS = ("model", "data", "train", "memory", "pipeline")
_READ = ("parallel_config", "parallel", "compat")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*", re.ASCII)
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """The two sections as written, and what around them decides their meaning."""

    written: Mapping[str, Any] = field(default_factory=dict)
    """By name: `recompute_config` and `swap_config`, or in place of the two those of the newer schema."""
    source: str = "the sections"
    """The file, for messages."""
    num_layers: int | None = None
    """Of the decoder, without layers for more than the next token; None: not said."""
    num_extra_layers: int = 0
    """Layers for more than the next token, which upstream counts too."""
    pipeline_stage: Any = 1
    pp_interleave_num: Any = 1
    offset: object = 0
    zero_bubble_v: bool = False
    """`parallel.pipeline_config.pipeline_scheduler` says so."""
    start_stage: int = 0
    """Added to the number of a stage where it is shown; it decides nothing."""
    model_type: str = ""
    """As the file says it: `llama`, `LlamaConfig`."""
    compat: bool = True
    places: Mapping[str, str] = field(default_factory=dict, compare=False)
    foreign: tuple[str, ...] = ()
    """Keys of the file that mean nothing here."""
    notes: tuple[str, ...] = ()

    @property
    def is_newer(self) -> bool:
        """Whether they are of the newer schema."""
        return any(is_newer(key, value) for key, value in self.written.items())

    def grid(self, num_layers: int, issues: Issues) -> Grid:
        """How the file deals so many layers to stages; in the newer schema it does not."""
        if self.is_newer:
            return make_grid(num_layers, 1, 1, 0, issues)
        dealt = (self.pipeline_stage, self.pp_interleave_num, self.offset)
        return make_grid(num_layers, *dealt, issues, zero_bubble_v=self.zero_bubble_v)

    def resolve(
        self, *, num_layers: int | None = None, names: Names | None = None, held: range | None = None
    ) -> Resolution:
        """What the sections mean for a model, or for the layers `held` by one stage of it.

        `names`: what a layer consists of, `{"feed_forward": {"mul": None, "w1": {...}}}`: None for an operator, a
        mapping for a module; one for all layers or one per layer. Absent: any name matches. Raises `ConfigError` with
        `file:line:column`, or with the dotted key for values that are from no file.
        """
        issues = Issues(compat=self.compat, places=self.places)
        issues.foreign += self.foreign
        issues.notes += self.notes
        if num_layers is None:
            if self.num_layers is None:
                raise ConfigError(
                    f"{self.source}: the file does not say how many layers the model has; pass num_layers"
                )
            num_layers = self.num_layers
            if isinstance(num_layers, int):
                num_layers += self.num_extra_layers
        is_newer = self.is_newer
        grid = self.grid(num_layers, issues)
        trees = trees_of(names, num_layers, issues)
        indices = range(num_layers) if held is None else held
        if is_newer:
            recompute, swap, unmatched = read_newer(self.written, trees=trees, held=indices, issues=issues)
        else:
            family = "mcore" if {family_of(tree) for tree in trees} == {"mcore"} else "legacy"
            swap = read_swap(self.written.get("swap_config"), num_layers, family=family, issues=issues)
            config = self.written.get("recompute_config")
            recompute = read_recompute(config, grid, swap=swap.is_on, family=family, issues=issues)
        work = Work(grid=grid, trees=trees, recompute=recompute, swap=swap, issues=issues, last_layer=indices[-1])
        if not is_newer:
            work.check_patterns()
        layers = [work.layer(index) for index in indices]
        report_lost(work)
        if is_newer:
            for path, pattern in unmatched:
                report_nothing(work, path, f"'{pattern}'", pattern)
        else:
            report_patterns(work)
            if held is not None:
                _note_other_split(grid, held, issues)
        if issues.foreign:
            issues.notes.insert(0, f"have no meaning here: {', '.join(issues.foreign)}")
        return Resolution(
            num_layers_per_stage=grid.table(),
            normalized=recompute.normalized() | swap.normalized(),
            layers=layers,
            log_lines=[] if is_newer else [*head_lines(work), *work.lines],
            warnings=issues.warnings,
            notes=issues.notes,
            prefetch_unit="layers" if is_newer else "operators",
            regathers=recompute.regathers,
            keeps_collectives=recompute.keeps_collectives,
            slices_inputs=recompute.slices_inputs,
        )


def read_sections(path: str | os.PathLike[str], root: RawValue | None = None) -> Sections:
    """The sections of a file, unresolved; `root` is its tree where it has been read already."""
    name = os.fspath(path)
    root = read_yaml(path) if root is None else root
    if root.kind != "mapping":
        raise ConfigError(
            f"{root.place}: expected a mapping with the section 'recompute_config', not {root.describe()}; write "
            "'recompute_config:' and its keys below it"
        )
    places: dict[str, str] = {}
    values = _values(root, "", places)
    issues = Issues(compat=True, places=places)
    _check_sections(name, values, issues)
    written = _below(values, "model")
    model = written | _below(written, "model_config")
    newer = {key: value for key, value in values.items() if is_newer(key, value)}
    is_ours = bool(values.keys() & {"train", "data"}) or ("model_type" in written and not newer)
    compat = issues.switch(values.get("compat", not is_ours), "compat")
    for key in ("offset", "pp_interleave_num", "num_layers"):
        written_at = next((path for path in (f"model.model_config.{key}", f"model.{key}") if path in places), None)
        if written_at is not None:
            places[key] = places[written_at]
    for key in ("parallel_config.pipeline_stage", "model.model_config.stage_num", "model.stage_num"):
        if key in places:
            places["pipeline_stage"] = places[key]
    num_layers, num_extra = _num_layers(model)
    kind = model.get("model_type") or model.get("type") or _below(written, "arch").get("type") or ""
    return Sections(
        written=newer or {key: values[key] for key in SECTIONS if key in values},
        source=name,
        num_layers=num_layers,
        num_extra_layers=num_extra,
        pipeline_stage=model.get("stage_num") or _below(values, "parallel_config").get("pipeline_stage", 1),
        pp_interleave_num=_num_chunks(values, model, issues),
        offset=model.get("offset", 0),
        zero_bubble_v=_below(_below(values, "parallel"), "pipeline_config").get("pipeline_scheduler")
        == "zero_bubble_v",
        start_stage=model.get("start_stage") or 0,
        model_type=str(kind),
        compat=compat,
        places=places,
        foreign=tuple(issues.foreign),
        notes=tuple(issues.notes),
    )


def has_sections(root: RawValue) -> bool:
    """Does the file have one of the two sections, or one of the newer schema?"""
    keys = {entry.key: dict.fromkeys(inner.key for inner in entry.node.entries) for entry in root.entries}
    return any(key in SECTIONS or is_newer(key, below) for key, below in keys.items())


def _check_sections(name: str, values: dict[str, Any], issues: Issues) -> None:
    """Is one of the sections there? What other keys are there is noted, unless one looks like a section."""
    keys = list(values)
    newer = [key for key in keys if is_newer(key, values[key])]
    others = [key for key in keys if key not in (*SECTIONS, *_OURS, *_READ, *newer)]
    for key in others:
        if did_you_mean(key, [section for section in SECTIONS if section not in keys]):
            hint = did_you_mean(key, SECTIONS)
            raise ConfigError(f"{issues.places[key]}: unknown section '{key}'{hint}")
    older = next((key for key in keys if key in SECTIONS), None)
    if newer and older:
        issues.refuse(
            newer[0],
            f"belongs to the newer schema of MindSpore Transformers, and '{older}' to the older; write one of them",
        )
    if not newer and not older:
        raise ConfigError(
            f"{name}:1:1: missing section 'recompute_config' or 'swap_config'; write one of them, "
            "or use lowtide plan for a section 'memory'"
        )
    for key in others:
        below = values[key].items() if isinstance(values[key], dict) else ()
        named = [join_path(key, inner) for inner, _ in below if is_foreign(inner)]
        issues.foreign += named or [key]


def _num_layers(model: dict[str, Any]) -> tuple[Any, int]:
    """Layers of the decoder, and those that upstream adds for more than the next token."""
    for key in ("num_layers", "num_hidden_layers"):
        if key in model:
            extra = model.get("mtp_depth") or model.get("num_nextn_predict_layers") or 0
            return model[key], extra if isinstance(extra, int) else 0
    return None, 0


def _num_chunks(values: dict[str, Any], model: dict[str, Any], issues: Issues) -> int:
    """Chunks count only where interleaving is switched on; upstream takes 1 without a word."""
    num_chunks = model.get("pp_interleave_num", 1)
    is_on = _below(_below(values, "parallel"), "pipeline_config").get("pipeline_interleave", False)
    if num_chunks != 1 and not is_on:
        issues.note("no effect: pp_interleave_num, because parallel.pipeline_config.pipeline_interleave is not true")
        return 1
    return num_chunks


def _below(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _values(node: RawValue, path: str, places: dict[str, str]) -> Any:
    """Python values by the rules of YAML 1.1; the place of each goes to `places` under its dotted key."""
    if path:
        places.setdefault(path, node.place)
    if node.kind == "list":
        return [_values(item, join_path(path, index), places) for index, item in enumerate(node.items)]
    if node.kind == "mapping":
        found = {}
        for entry in node.entries:
            below = join_path(path, entry.key)
            if not path:
                places[below] = entry.place
            found[entry.key] = _values(entry.node, below, places)
        return found
    return _scalar(node)


def _scalar(node: RawValue) -> Any:
    text = node.value
    if node.is_null:
        return None
    if not node.is_text or not isinstance(text, str):
        return text
    if text in _WORDS or (text.lower() in _WORDS and text in (text.upper(), text.capitalize())):
        return _WORDS[text.lower()]
    if (num_digits := too_many_digits(node)) is not None:
        raise ConfigError(f"{node.place}: a number of {num_digits} digits; the most is {MOST_DIGITS}")
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _note_other_split(grid: Grid, held: range, issues: Issues) -> None:
    """Counts are of the file's stages; say so where the module at hand is not one of them."""
    chunk, stage = grid.locate(held[0])
    row, column = grid.cell(held[0])
    first = grid.starts[row][column]
    written = range(first, first + grid.sizes[row][column])
    if held != written and grid.num_stages * grid.num_chunks > 1:
        issues.note(
            f"this module holds {layers_text(held)}, but by the file stage {stage} of chunk {chunk} holds "
            f"{layers_text(written)}; counts are read by the file"
        )
