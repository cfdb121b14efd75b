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
from benchmarks.children import say
from benchmarks.record import RESULTS, Record

KEYS = ("model", "batch", "sequence", "method", "setting", "measure")
"""What tells one row from another; a row need not have all."""


_WORTH_ANOTHER_TRY = ("TimeoutError", "the process ended", "plain could not run")
"""Errors that may be the machine's, not the method's: a run that resumes tries those rows again."""


class Rows:
    """The rows of `start`, a record without rows, in `folder` (default: `benchmarks/results`).

    `resumes` keeps the rows of the file that is there, and `only` (models) those of other models; neither does if
    settings or versions are not the same.
    """

    def __init__(
        self, start: Record, *, folder: Path | None = None, resumes: bool = False, only: Sequence[str] | None = None
    ) -> None:
        self._record = start
        self._folder = folder
        self.path = (folder or RESULTS) / start.hardware["folder"] / f"{start.question}.json"
        if self.path.exists() and (resumes or only):
            self._take_over(record.read(self.path), keeps_all=resumes, only=only or ())

    @property
    def record(self) -> Record:
        """As it stands."""
        return self._record

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """In the order in which they came."""
        return self._record.rows

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these values that need not be tried again; `key` takes some of `KEYS`."""
        found = [row for row in self._record.rows if all(row.get(name) == value for name, value in key.items())]
        return any(not str(row.get("error") or "").startswith(_WORTH_ANOTHER_TRY) for row in found)

    def add(self, row: dict[str, Any]) -> None:
        """Put `row` in the place of one with the same key, or at the end, and write the file."""
        known = [i for i, other in enumerate(self._record.rows) if _key(other) == _key(row)]
        if known:
            self._record.rows[known[0]] = row
        else:
            self._record.rows.append(row)
        record.write(self._record, self._folder)

    def _take_over(self, before: Record, *, keeps_all: bool, only: Sequence[str]) -> None:
        now = self._record
        for what, ours, theirs in (
            ("settings", now.settings, before.settings),
            ("versions", now.versions, before.versions),
        ):
            if ours != theirs:
                say(f"{self.path}: made with other {what}; begun anew")
                return
        rows = [row for row in before.rows if keeps_all or row.get("model") not in only]
        self._record = dataclasses.replace(now, rows=rows, notes=list(dict.fromkeys([*before.notes, *now.notes])))


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row.get(name) for name in KEYS)
