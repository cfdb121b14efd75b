"""The pieces that a report is made of: large figures, tables, and what was measured; any of them as a file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from lowtide.core.json_text import Mistake, build, parse_json
from lowtide.errors import ConfigError

_Element = TypeVar("_Element")


def to_json(element: Any) -> str:
    """As text; `from_json` gives back an equal one."""
    return json.dumps(dataclasses.asdict(element)) + "\n"


def from_json(kind: type[_Element], text: str) -> _Element:
    """What `to_json` wrote. Raises ConfigError for anything else."""
    try:
        return build(kind, parse_json(text, "file"))
    except (Mistake, ConfigError) as error:
        raise ConfigError(f"not as lowtide wrote it: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One large figure."""

    what: str
    value: str
    beside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; the first is the head."""

    title: str
    caption: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run did, beside what its plan said."""

    peak_bytes: int | None = None
    is_without_temporaries: bool = False
    """Whether temporaries are missing from `peak_bytes`; such a peak cannot be compared with the predicted one."""
    step_seconds: float | None = None
    """Forward and backward of one micro-batch."""
    stall_seconds: float | None = None


NOTHING = Measured()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step of a run."""

    step: int
    loss: float
    seconds: float
    peak_bytes: int | None
