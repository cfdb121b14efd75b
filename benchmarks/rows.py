"""The rows of one question, written as they come, so that a run that is cut short leaves what it has done.

What: `Rows` holds a `Record` in the making. `add` puts a row in and writes the whole file at once or not at all;
with `resumes` the rows of the file that is there stay, and `has` says which need not be run again.
Why: a benchmark on a borrowed device runs in pieces; a run on a laptop is interrupted.
Cost: one small file written per row. Not covered: two runs that write the same file at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.record import RESULTS, Record

KEYS = ("model", "batch", "sequence", "method", "setting", "measure")
"""What tells one row from another; a row need not have all."""


class OtherSettingsError(ValueError):
    """The file that a run wants to resume was made with other settings."""


class Rows:
    """The rows of `start`, a record without rows, in `folder` (default: `benchmarks/results`)."""

    def __init__(self, start: Record, *, folder: Path | None = None, resumes: bool = False) -> None:
        self._record = start
        self._folder = folder
        self.path = (folder or RESULTS) / start.hardware["folder"] / f"{start.question}.json"
        if resumes and self.path.exists():
            self._take_over(record.read(self.path))

    @property
    def record(self) -> Record:
        """As it stands."""
        return self._record

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """In the order in which they came."""
        return self._record.rows

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these values; `key` takes some of `KEYS`."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self._record.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Put `row` in the place of one with the same key, or at the end, and write the file."""
        known = [i for i, other in enumerate(self._record.rows) if _key(other) == _key(row)]
        if known:
            self._record.rows[known[0]] = row
        else:
            self._record.rows.append(row)
        record.write(self._record, self._folder)

    def note(self, sentence: str) -> None:
        """Add a sentence for the report, once."""
        if sentence not in self._record.notes:
            self._record.notes.append(sentence)

    def _take_over(self, before: Record) -> None:
        for name, value in self._record.settings.items():
            if before.settings.get(name, value) != value:
                raise OtherSettingsError(
                    f"{self.path}: its rows have {name} = {before.settings[name]}, this run has {value}; "
                    "leave out --resume to begin anew, or give another --folder"
                )
        self._record = dataclasses.replace(
            self._record, rows=list(before.rows), notes=list(dict.fromkeys([*before.notes, *self._record.notes]))
        )


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row.get(name) for name in KEYS)
