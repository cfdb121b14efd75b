"""What is said about a configuration while it is resolved: refusals, warnings and notes, each with its place.

One decision is made here and nowhere else: where MindSpore Transformers hangs, crashes on a form that its documents
allow, or silently does nothing, `compat` goes on with the sensible meaning and warns, and strict refuses. All of these
cases are in differences.toml, in words. What upstream refuses cleanly is refused in both.

Messages. From a file: `run.yaml:3:14: 'recompute_config.recompute[0]' asks for -1 layers; write 0 or more`. From Python
values the dotted key is the place: `recompute_config.recompute[0]: asks for -1 layers; write 0 or more`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lowtide.config.source import join_path, nearest
from lowtide.errors import ConfigError, did_you_mean

_DIFFERENCES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    (Path(__file__).parent / "differences.toml").read_text(encoding="utf-8")
)
"""Where upstream goes wrong: problem, meaning and fix of each case."""
_OF_NEWER = ("mode", "full_recompute_layer", "select_module", "exclude_op", "enable")
"""Keys of the newer schema that people write into the older one."""


@dataclass(slots=True, kw_only=True)
class Issues:
    """Collects while one configuration is resolved; not frozen, because that is its work."""

    compat: bool
    places: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> `run.yaml:3:14`; empty for Python values."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Facts worth one line of information; nothing is wrong."""
    foreign: list[str] = field(default_factory=list)
    """Keys that mean nothing here; all of them go into one note."""

    def at(self, path: str) -> str:
        """How a message about `path` starts. A key that was not written is named by what is around it."""
        around = nearest(path, self.places)
        return f"{self.places[around]}: '{path}'" if around else f"{path}:"

    def where(self, path: str) -> str:
        """A rule and where it was written: `swap_config.op_swap[0] (run.yaml:9:5)`."""
        place = self.at(path).partition(": ")[0]
        return f"{path} ({place})" if self.places and place != path else path

    def refuse(self, path: str, message: str) -> NoReturn:
        """Wrong in both modes."""
        raise ConfigError(f"{self.at(path)} {message}")

    def tolerate(self, path: str, difference: str, **values: object) -> None:
        """`compat` takes what a `difference` means and warns; strict refuses and says how to mend it."""
        told = {part: text.format(**values) for part, text in _DIFFERENCES[difference].items()}
        if not self.compat:
            self.refuse(path, f"{told['problem']}; {told['fix']}")
        self.warn(path, f"{told['problem']}; {told['meaning']}")

    def mapping(self, value: Any, path: str, keys: tuple[str, ...], *, hidden: tuple[str, ...] = ()) -> dict[str, Any]:
        """The entries of a section, none for None. Unknown keys are refused, `hidden` ones are not in the message; what
        means nothing here is noted."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(path, f"must be a mapping of keys such as '{keys[0]}', not {value!r}")
        for key in value:
            if is_foreign(key):
                self.foreign.append(join_path(path, key))
            elif key not in (*keys, *hidden):
                what, known = "is not a known key", "; known keys: " + ", ".join(keys)
                if key in _OF_NEWER and not set(keys) & set(_OF_NEWER):
                    what = "belongs to the newer schema of MindSpore Transformers, below 'recompute' or 'swap'"
                else:
                    known = did_you_mean(str(key), keys) or known
                self.refuse(join_path(path, str(key)), what + known)
        return {key: below for key, below in value.items() if not is_foreign(key)}

    def switch(self, value: object, path: str) -> bool:
        """A value that must be true or false."""
        if not isinstance(value, bool):
            self.refuse(path, f"must be true or false, not {value!r}")
        return value

    def warn(self, path: str, message: str) -> None:
        text = f"{self.at(path)} {message}"
        if text not in self.warnings:
            self.warnings.append(text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def is_foreign(key: object) -> bool:
    """Settings of MindSpore's compiler that sometimes stand beside ours and mean nothing to PyTorch."""
    return isinstance(key, str) and (key == "memory_optimize_level" or key.startswith("ENABLE_LAZY_INLINE"))


def layers_text(indices: Iterable[int]) -> str:
    """`layer 3`, `layers 0-2, 5`."""
    ordered = sorted(set(indices))
    pieces: list[list[int]] = []
    for index in ordered:
        if pieces and pieces[-1][1] == index - 1:
            pieces[-1][1] = index
        else:
            pieces.append([index, index])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)
    return f"layer {text}" if len(ordered) == 1 else f"layers {text}"
