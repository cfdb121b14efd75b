"""The pieces that a report is made of: large figures, tables, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.core.measured_curve import MeasuredCurve


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
    curve: MeasuredCurve | None = None
    """Bytes over time of an audited step."""


NOTHING = Measured()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step of a run."""

    step: int
    loss: float
    seconds: float
    peak_bytes: int | None
