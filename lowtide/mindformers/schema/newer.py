r"""The newer schema of MindSpore Transformers: `recompute`, `recompute_comm` and `swap` at the top of the file.

    recompute: {mode: select, select_module: {'mlp\.(gate|up)_proj': ['0-3']}, exclude_op: {'mlp\.gate_proj': ['0']}}
    recompute_comm: {enable: False}
    swap: {enable: True, default_prefetch: 1, layer_swap: [{layers: ['4-5']}], op_swap: [{op_name: mlp, layers: ['6']}]}

Layers are numbers in the whole model, as ranges in ascending order. A name is one regular expression over the whole
path below the layer, so `.*` crosses levels; what lies in a part that is named too belongs to it. A prefetch counts
layers: the fetch for layer i starts when backward reaches layer i + default_prefetch.

What: the same rules as those of the older schema (recompute.py, swap.py), so that the same code gives the plans.
Not covered: log lines, which upstream writes otherwise here; several entries of `layer_swap`, of which upstream reads
the first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.config.source import join_path
from lowtide.mindformers.schema.issues import Issues
from lowtide.mindformers.schema.names import Tree, find_whole, is_within, problem
from lowtide.mindformers.schema.recompute import Recompute, Selection
from lowtide.mindformers.schema.swap import Swap, mappings_in

KEYS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("mode", "full_recompute_layer", "select_module", "exclude_op", "use_reentrant"),
    "recompute_comm": ("enable", "select_module"),
    "swap": ("enable", "default_prefetch", "layer_swap", "op_swap"),
}
_BEFORE_MODE = ("full_recompute", "select_recompute")
"""How version 1.9 switched it; only `false` is read."""
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)


def is_newer(key: str, below: object) -> bool:
    """Is this entry of a file a section of the newer schema? Lowtide's own `recompute` and `swap` are no mappings."""
    known = (*KEYS.get(key, ()), *(_BEFORE_MODE if key == "recompute" else ()))
    return isinstance(below, Mapping) and any(name in known for name in below)


def read_newer(
    sections: Mapping[str, Any], *, trees: list[Tree | None], held: range, issues: Issues
) -> tuple[Recompute, Swap, list[tuple[str, str]]]:
    """The sections for a model with these layers, of which one stage has `held`; and (path, pattern) of what named
    nothing.

    Raises `ConfigError` for what upstream refuses; for what it warns about, or silently leaves out, unless `compat`.
    """
    reader = _NewerReader(trees=trees, held=held, issues=issues)
    swap = reader.swap(reader.section(sections, "swap"))
    recompute = reader.recompute(reader.section(sections, "recompute"), reader.section(sections, "recompute_comm"))
    return recompute, swap, reader.unmatched


@dataclass(slots=True, kw_only=True)
class _NewerReader:
    trees: list[Tree | None]
    held: range
    issues: Issues
    unmatched: list[tuple[str, str]] = field(default_factory=list)
    """(path, pattern) that named nothing."""

    def section(self, sections: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        hidden = _BEFORE_MODE if key == "recompute" else ()
        return self.issues.mapping(sections.get(key), key, KEYS[key], hidden=hidden)

    # ---- recompute

    def recompute(self, section: Mapping[str, Any], comm: Mapping[str, Any]) -> Recompute:
        mode = self._mode(section)
        for key in ("full_recompute_layer", "select_module", "exclude_op"):
            is_read = mode == "select" or (mode == "full" and key != "select_module")
            if section.get(key) and not is_read:
                self.issues.note(f"no effect: recompute.{key}, because recompute.mode is {mode or 'None'}")
        needed = {"full": "full_recompute_layer", "select": "select_module"}.get(mode or "")
        if needed is not None and not section.get(needed):
            self.issues.refuse("recompute", f"has mode {mode} but no {needed}; write it, or mode: None")
        if section.get("use_reentrant") is not None:
            self.issues.note(
                "no effect: recompute.use_reentrant, because lowtide runs layers again in a way of its own"
            )
        path = "recompute.full_recompute_layer"
        full = self.layers(section.get("full_recompute_layer"), path) if mode else []
        selected = self.parts(section.get("select_module"), "recompute.select_module") if mode == "select" else {}
        excluded = self.parts(section.get("exclude_op"), "recompute.exclude_op") if mode else {}
        is_comm = self.issues.switch(comm.get("enable", False), "recompute_comm.enable")
        if is_comm and not comm.get("select_module"):
            self.issues.refuse("recompute_comm", "is enabled but has no select_module; write it, or enable: false")
        if comm.get("select_module") and not is_comm:
            self.issues.note("no effect: recompute_comm.select_module, because recompute_comm.enable is not true")
        by_key = {
            "select_recompute": selected,
            "select_comm_recompute": self.parts(comm.get("select_module"), "recompute_comm.select_module")
            if is_comm
            else {},
            "select_recompute_exclude": excluded,
            "select_comm_recompute_exclude": {},
        }
        return Recompute(full=Selection(shown=full, path=path), by_key=by_key, removed=(), takes_modules=True)

    def _mode(self, section: Mapping[str, Any]) -> str | None:
        for key in _BEFORE_MODE:
            if section.get(key):
                self.issues.refuse(
                    f"recompute.{key}", "is how version 1.9 says it, which is not read; write mode: full or select"
                )
        mode = section.get("mode")
        if mode in ("full", "select"):
            return str(mode)
        if mode not in (None, "None"):
            self.issues.refuse("recompute.mode", f"must be full, select or None, not {mode!r}")
        return None

    # ---- swap

    def swap(self, section: Mapping[str, Any]) -> Swap:
        if not self.issues.switch(section.get("enable", False), "swap.enable"):
            for key in ("layer_swap", "op_swap"):
                if section.get(key):
                    self.issues.note(f"no effect: swap.{key}, because swap.enable is not true")
            return Swap(ops={})
        prefetch = section.get("default_prefetch", 1)
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or not 1 <= prefetch < len(self.trees):
            self.issues.refuse(
                "swap.default_prefetch",
                f"must be a number of layers, 1 to {len(self.trees) - 1}, not {prefetch!r}",
            )
        whole = self._whole_layers(section.get("layer_swap"), prefetch)
        wanted: dict[str, tuple[list[int], str]] = {}
        for item, path in self._entries(section.get("op_swap"), "swap.op_swap"):
            name = item.get("op_name")
            if not isinstance(name, str) or not name.strip():
                self.issues.refuse(f"{path}.op_name", f"must be a name, not {name!r}")
            if name in wanted:
                self.issues.tolerate(path, "second_entry_of_name", name=name)
            layers = self.layers(item["layers"], f"{path}.layers", prefetch=prefetch)
            swapped_whole = whole[0].shown if whole else []
            assert isinstance(swapped_whole, list)
            wanted[name] = ([index for index in layers if index not in swapped_whole], path)
        ops = {
            pattern: (dataclasses.replace(selection, prefetch=prefetch),)
            for pattern, selection in self._expanded(wanted).items()
        }
        if not whole and not ops and not self.unmatched:
            self.issues.note("swap: it is enabled, but layer_swap and op_swap are empty, so nothing is swapped")
        return Swap(is_on=True, layers=whole, ops=ops)

    def _whole_layers(self, value: Any, prefetch: int) -> tuple[Selection, ...]:
        entries = self._entries(value, "swap.layer_swap")
        for _, path in entries[1:]:
            self.issues.tolerate(path, "second_entry")
        found = []
        for item, path in entries[:1]:
            layers = self.layers(item["layers"], f"{path}.layers", prefetch=prefetch)
            found.append(Selection(shown=layers, path=path, prefetch=prefetch))
        return tuple(found)

    def _entries(self, value: Any, path: str) -> list[tuple[Mapping[str, Any], str]]:
        found = mappings_in(value, path, "layers", self.issues)
        for item, where in found:
            if "layers" not in item:
                self.issues.refuse(where, "has no layers; write a list such as ['0-3']")
            for key in item:
                if key not in ("layers", "op_name"):
                    self.issues.tolerate(join_path(where, str(key)), "key_of_older")
        return found

    # ---- layers and names

    def layers(self, value: Any, path: str, *, prefetch: int = 0) -> list[int]:
        """Numbers of layers from ranges such as ['0-3', '5']; with `prefetch`, those that can be fetched so early."""
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.issues.refuse(path, f"must be a list of layers such as ['0-3', '5'], not {value!r}")
        found: list[int] = []
        for index, item in enumerate(value):
            where = join_path(path, index)
            match = _RANGE.fullmatch(str(item).strip()) if isinstance(item, str | int) else None
            if match is None:
                self.issues.refuse(where, f"must be a layer such as '5' or a range such as '0-3', not {item!r}")
            first, last = int(match[1]), int(match[2] or match[1])
            if first > last:
                self.issues.refuse(where, f"runs backwards; write '{last}-{first}'")
            if last >= len(self.trees):
                self.issues.refuse(where, f"names layer {last}, but layers are 0 to {len(self.trees) - 1}")
            if found and first <= found[-1]:
                self.issues.refuse(
                    where, f"starts at layer {first}, but {found[-1]} is named before; write ranges in ascending order"
                )
            found += range(first, last + 1)
        if found and prefetch and found[-1] + prefetch >= len(self.trees):
            self.issues.refuse(
                path,
                f"names layer {found[-1]}, which would be fetched when backward reaches layer {found[-1] + prefetch}, "
                f"but layers are 0 to {len(self.trees) - 1}; name layers up to {len(self.trees) - prefetch - 1}",
            )
        return found

    def parts(self, value: Any, path: str) -> dict[str, Selection]:
        """Parts of layers from a mapping of expressions to ranges; a list of expressions is for every layer."""
        if value is None:
            return {}
        if isinstance(value, list | tuple):
            wanted = {name: (list(range(len(self.trees))), join_path(path, at)) for at, name in enumerate(value)}
        elif isinstance(value, Mapping):
            wanted = {name: (self.layers(at, join_path(path, str(name))), path) for name, at in value.items()}
            wanted = {name: (layers, join_path(path, str(name))) for name, (layers, _) in wanted.items()}
        else:
            self.issues.refuse(path, f"must be a mapping of names to layers such as {{mlp: ['0-3']}}, not {value!r}")
        for name in wanted:
            if not isinstance(name, str) or not name.strip():
                self.issues.refuse(path, f"must map names to layers, but {name!r} is not a name")
        return self._expanded(wanted)

    def _expanded(self, wanted: Mapping[str, tuple[list[int], str]]) -> dict[str, Selection]:
        """Every part that an expression names, as a pattern of its own with its layers; parts of others left out."""
        by_layer: dict[int, dict[str, str]] = {}
        for expression, (layers, path) in wanted.items():
            if (wrong := problem(expression)) is not None:
                self.issues.refuse(path, f"{wrong}: {expression!r}")
            here = [index for index in layers if index in self.held]
            names = {index: find_whole(expression, self.trees[index]) for index in here}
            if here and not any(names.values()):
                self.unmatched.append((path, expression))
            for index, found in names.items():
                for name in found:
                    by_layer.setdefault(index, {}).setdefault(name, path)
        chosen: dict[str, tuple[list[int], str]] = {}
        for index, paths in sorted(by_layer.items()):
            for name, path in paths.items():
                if not any(other != name and is_within(name, other) for other in paths):
                    # The expression of the older schema that names exactly this part.
                    pattern = r"\.".join(map(re.escape, name.split(".")))
                    chosen.setdefault(pattern, ([], path))[0].append(index)
        return {pattern: Selection(shown=layers, path=path) for pattern, (layers, path) in chosen.items()}
