"""`swap_config` into entries: which layers and which ops are swapped, and how early they are fetched back.

    swap: true
    default_prefetch: 10                       # of the default: flash_attention in every layer
    layer_swap:                                # whole layers; the first entry that names a layer decides
      - {backward_prefetch: 20, layers: [0, 3]}
    op_swap:                                   # ops by pattern; of one pattern the first entry that names a layer
      - {op_name: attention, backward_prefetch: 20, layers: [0, 1, 2]}
      - {op_name: [feed_forward, ffn_norm], backward_prefetch: 15, layers: true}

The default holds only where neither list is given. Entries are checked also while `swap` is false, as upstream does.
A prefetch is a number of operators of the backward pass, not of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.config.source import join_path
from lowtide.errors import did_you_mean
from lowtide.mindformers.schema.issues import Issues
from lowtide.mindformers.schema.recompute import Prefetch, Selection, check_indices

KEYS = ("swap", "default_prefetch", "layer_swap", "op_swap")
ENTRY_KEYS = ("op_name", "backward_prefetch", "layers")
ROOT = "swap_config"
DEFAULT_OP = r".*\.flash_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """`swap_config`, read."""

    is_on: bool = False
    is_default: bool = False
    """Neither list was given."""
    layers: tuple[Selection, ...] = ()
    ops: Mapping[str, tuple[Selection, ...]]
    """Pattern -> entries, in the order written."""

    def normalized(self) -> dict[str, Any]:
        if not self.is_on:
            return {"layer_swap": [], "op_swap": {}}
        ops = {pattern: _shown(entries) for pattern, entries in self.ops.items()}
        return {"layer_swap": _shown(self.layers), "op_swap": ops}


def _shown(entries: tuple[Selection, ...]) -> list[dict[str, Any]]:
    return [{"backward_prefetch": entry.prefetch, "layers": entry.shown} for entry in entries]


def first_entry(entries: tuple[Selection, ...], layer: int) -> Selection | None:
    return next((entry for entry in entries if entry.covers(layer)), None)


def mappings_in(value: Any, path: str, keys: str, issues: Issues) -> list[tuple[Mapping[str, Any], str]]:
    """Each mapping of a list with its place; none for None. `keys`: what one must have, for messages."""
    if value is None:
        return []
    if not isinstance(value, list):
        issues.refuse(path, f"must be a list of mappings, not {value!r}")
    items = [(item, join_path(path, index)) for index, item in enumerate(value)]
    for item, where in items:
        if not isinstance(item, Mapping):
            issues.refuse(where, f"must be a mapping with {keys}, not {item!r}")
    return items


def read_swap(written: object, num_layers: int, *, family: str, issues: Issues) -> Swap:
    """Check and normalise `swap_config`; `family` is the naming of the model (aliases.py)."""
    config = issues.mapping(written, ROOT, KEYS)
    is_on = issues.switch(config.get("swap", False), f"{ROOT}.swap")
    default = _prefetch(config.get("default_prefetch", 1), f"{ROOT}.default_prefetch", issues, is_on=is_on)
    layer_swap, op_swap = config.get("layer_swap"), config.get("op_swap")
    if layer_swap is None and op_swap is None:
        if is_on and family == "mcore" and issues.compat and default != 1:
            issues.warn(
                f"{ROOT}.default_prefetch",
                f"is {default}, but upstream uses 1 for models with these names, and so does compat; "
                f"write op_swap with the prefetch you want",
            )
            default = 1
        key = "default_prefetch" if "default_prefetch" in config else "swap"
        entry = Selection(prefetch=default, shown=True, path=join_path(ROOT, key))
        return Swap(is_on=is_on, is_default=True, ops={DEFAULT_OP: (entry,)})
    reader = _SwapReader(num_layers=num_layers, is_on=is_on, issues=issues)
    swap = Swap(is_on=is_on, layers=reader.layer_swap(layer_swap), ops=reader.op_swap(op_swap))
    if not is_on:
        lists = " and ".join(f"{ROOT}.{key}" for key in ("layer_swap", "op_swap") if config.get(key))
        if lists:
            why = "false" if "swap" in config else "not written, which is false"
            issues.note(f"no effect: {lists}, because {ROOT}.swap is {why}; write swap: true")
    elif not swap.layers and not swap.ops:
        issues.note(f"{ROOT}: swap is on, but layer_swap and op_swap are empty, so nothing is swapped")
    if "default_prefetch" in config:
        issues.note(f"no effect: {ROOT}.default_prefetch, because layer_swap or op_swap is given")
    return swap


@dataclass(frozen=True, slots=True, kw_only=True)
class _SwapReader:
    num_layers: int
    is_on: bool
    issues: Issues

    def layer_swap(self, value: Any) -> tuple[Selection, ...]:
        path = f"{ROOT}.layer_swap"
        return self._entries(self._items(value, path), path)

    def op_swap(self, value: Any) -> dict[str, tuple[Selection, ...]]:
        path = f"{ROOT}.op_swap"
        by_name: dict[str, list[tuple[Mapping, str]]] = {}
        for item, where in self._items(value, path):
            for name in self._names(item, where):
                by_name.setdefault(name, []).append((item, where))
        return {name: self._entries(items, f"{path} of '{name}'") for name, items in by_name.items()}

    def _items(self, value: Any, path: str) -> list[tuple[Mapping, str]]:
        if isinstance(value, Mapping):
            return [(value, path)]
        return mappings_in(value, path, "backward_prefetch and layers", self.issues)

    def _names(self, item: Mapping, path: str) -> list[str]:
        if "op_name" not in item:
            self.issues.refuse(path, "has no op_name; write which op is swapped, such as op_name: attention")
        names = item["op_name"]
        if isinstance(names, str):
            return [names]
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return list(names)
        self.issues.refuse(f"{path}.op_name", f"must be a name or a list of names, not {names!r}")

    def _entries(self, items: list[tuple[Mapping, str]], path: str) -> tuple[Selection, ...]:
        """The entries of one name; one that says `layers: true` must agree with the others, and replaces them."""
        entries = [self._entry(item, where) for item, where in items]
        if any(entry.shown is True for entry in entries):
            first = entries[0]
            for entry in entries:
                if entry.prefetch != first.prefetch:
                    self.issues.refuse(
                        entry.path,
                        f"has backward_prefetch {entry.prefetch}, but another entry of {path.rsplit('.', 1)[-1]} has "
                        f"{first.prefetch} and one says layers: true; write one prefetch, or list the layers",
                    )
            return (Selection(prefetch=first.prefetch, shown=True, path=first.path),)
        return tuple(entries)

    def _entry(self, item: Mapping, path: str) -> Selection:
        if "layers" not in item:
            self.issues.refuse(path, "has no layers; write layers: true or a list of layer indices")
        layers = self._layers(item["layers"], f"{path}.layers")
        if "backward_prefetch" not in item:
            self.issues.refuse(path, "has no backward_prefetch; write a number of operators, such as 20")
        for key in item:
            if key not in ENTRY_KEYS:
                hint = did_you_mean(str(key), ENTRY_KEYS).removeprefix("; ") or "remove it"
                self.issues.tolerate(join_path(path, str(key)), "unknown_key", hint=hint)
        prefetch = _prefetch(item["backward_prefetch"], f"{path}.backward_prefetch", self.issues, is_on=self.is_on)
        return Selection(prefetch=prefetch, shown=layers, path=path)

    def _layers(self, value: Any, path: str) -> list[int] | bool:
        if isinstance(value, bool):
            return value or []
        if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            check_indices(value, path, self.num_layers, self.issues)
            return list(value)
        is_flat = isinstance(value, list | tuple)
        if is_flat and self.is_on is False and all(isinstance(item, int | list | tuple) for item in value):
            return []
        hint = "; write one list" if is_flat and any(isinstance(item, list | tuple) for item in value) else ""
        if isinstance(value, tuple) and not hint:
            hint = f"; write {list(value)}"
        self.issues.refuse(path, f"must be true, false or a list of layer indices such as [0, 3], not {value!r}{hint}")


def _prefetch(value: Any, path: str, issues: Issues, *, is_on: bool) -> Prefetch:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if value == 0 and isinstance(value, int) and not isinstance(value, bool):
        issues.tolerate(path, "prefetch_0")
        return value
    if isinstance(value, str) and value.lower() == "auto":
        issues.tolerate(path, "prefetch_auto")
        return value
    problem = f"must be a number of operators, 1 or more, not {value!r}"
    if is_on:
        issues.refuse(path, problem)
    issues.tolerate(path, "prefetch_unread", value=value)
    return 1
