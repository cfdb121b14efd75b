"""What is said about a configuration while it is resolved: refusals, warnings and notes, each with its place.

One decision is made here and nowhere else: where MindSpore Transformers hangs, crashes on a form that its documents
allow, or silently does nothing, `compat` goes on with the sensible meaning and warns, and strict refuses. What upstream
refuses cleanly is refused in both.

Messages. From a file: `run.yaml:3:14: 'recompute_config.recompute[0]' asks for -1 layers; write 0 or more`. From Python
values the dotted key is the place: `recompute_config.recompute[0]: asks for -1 layers; write 0 or more`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from lowtide.errors import ConfigError


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
        around = path
        while around and around not in self.places:
            around = around[: max(around.rfind("."), around.rfind("["), 0)]
        return f"{self.places[around]}: '{path}'" if around else f"{path}:"

    def where(self, path: str) -> str:
        """A rule and where it was written: `swap_config.op_swap[0] (run.yaml:9:5)`."""
        place = self.at(path).partition(": ")[0]
        return f"{path} ({place})" if self.places and place != path else path

    def refuse(self, path: str, message: str) -> NoReturn:
        """Wrong in both modes."""
        raise ConfigError(f"{self.at(path)} {message}")

    def tolerate(self, path: str, problem: str, *, meaning: str, fix: str) -> None:
        """`compat` takes it as `meaning` and warns; strict refuses and says how to `fix` it."""
        if not self.compat:
            self.refuse(path, f"{problem}; {fix}")
        self.warn(path, f"{problem}; {meaning}")

    def warn(self, path: str, message: str) -> None:
        text = f"{self.at(path)} {message}"
        if text not in self.warnings:
            self.warnings.append(text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


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
