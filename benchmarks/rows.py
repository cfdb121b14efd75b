"""What all benchmarks share: arguments, pieces of work, rows written as they come, resuming, errors that are rows.

What: `Rows` holds a `Record` in the making: `put` writes the whole file, at once or not at all, and a run that resumes
keeps the rows that are there. `run` answers a question of *pieces* (a model, a method, a size), each named by a small
mapping, with a function that turns one piece into rows; `answer` one that fills the rows by itself. Both say what they
do on stderr, and print the table, or with `--json` the record, at the end.
Why: what ran for an hour must survive a Ctrl-C, a machine that is taken away, and one method that cannot run.
Cost: one small file written per row. Not covered: pieces that run side by side, two runs that write the same file.

- `--resume` keeps the rows of an earlier run and does what is missing, and what had failed, if settings and versions
  are the same; else it says so and starts anew.
- `--only NAME` does the pieces of that name alone, and keeps the rows of the others under the same condition.
- A piece that raises becomes a row with the piece's own keys and `error`, and the exit status is 1.
- Ctrl-C ends the run with status 130; the rows so far are in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.children import say
from benchmarks.record import RESULTS, Record

Row = dict[str, Any]
KEYS = ("model", "batch", "sequence", "vocabulary", "optimizer", "method", "setting", "measure")
"""What tells one row from another where there are no pieces; a row need not have all."""

_WORTH_ANOTHER_TRY = ("TimeoutError", "the process ended", "plain could not run")
"""Errors that may be the machine's, not the method's: a run that resumes tries those rows again."""
_NOT_OF_THE_COMMAND = ("--resume", "--json")
_WITH_VALUES = ("--only", "--out")
_INTERRUPTED = 130


def parser(module: str, description: str | None, *, device: str = "cpu", only: str = "NAME") -> argparse.ArgumentParser:
    """The arguments that every benchmark has. `description` is the module's docstring, `only` what `--only` names."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", default=device, help="where it runs: cpu, cuda, npu, ...")
    made.add_argument("--resume", action="store_true", help="keep what an earlier run has found, do the rest")
    made.add_argument("--only", nargs="+", metavar=only, help="these alone; the others keep their rows")
    made.add_argument("--json", action="store_true", help="print the record instead of the table")
    made.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results/ is")
    return made


def command_of(module: str, argv: Sequence[str]) -> str:
    """What makes the same rows again: without what only says how they are shown, where, and in how many runs."""
    kept, is_skipping = [], False
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0]
            is_skipping = word in _WITH_VALUES
            if name in (*_WITH_VALUES, *_NOT_OF_THE_COMMAND):
                continue
        if not is_skipping:
            kept.append(word)
    return " ".join([f"python -m benchmarks.{module}", *kept])


class Rows:
    """The rows of `start`, a record without rows, in `folder`.

    `resumes` keeps the rows of the file that is there, and `only` (models) those of other models; neither does if
    settings or versions are not the same. With `pieces`, rows stand in their order, and those of no piece are dropped.
    """

    def __init__(
        self,
        start: Record,
        *,
        folder: Path | None = None,
        resumes: bool = False,
        only: Sequence[str] | None = None,
        pieces: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        assert not start.rows
        self.record = start
        """As it stands."""
        self._folder = folder
        self._pieces = pieces
        self.path = (folder or RESULTS) / start.hardware["folder"] / f"{start.question}.json"
        if self.path.exists() and (resumes or only):
            self._take_over(record.read(self.path), leaves_out=() if resumes or not only else only)

    @property
    def rows(self) -> Sequence[Row]:
        """In the order of the pieces, or in which they came."""
        return self.record.rows

    def of(self, key: Mapping[str, Any]) -> list[Row]:
        """The rows with these values; what a row does not have is None."""
        return [row for row in self.record.rows if _has(row, key)]

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these values that need not be tried again; `key` takes some of `KEYS`."""
        return any(not str(row.get("error") or "").startswith(_WORTH_ANOTHER_TRY) for row in self.of(key))

    def add(self, row: Row) -> None:
        """Put `row` in the place of one with the same values of `KEYS`, or at the end, and write the file."""
        self.put({name: row.get(name) for name in KEYS}, [row])

    def put(self, key: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Put `rows` in the place of those with these values, or at the end, and write the file."""
        before = self.record.rows
        place = next((number for number, row in enumerate(before) if _has(row, key)), len(before))
        others = [[row for row in part if not _has(row, key)] for part in (before[:place], before[place:])]
        self._set([*others[0], *rows, *others[1]])
        record.write(self.record, self._folder)

    def _set(self, rows: Sequence[Row]) -> None:
        if self._pieces:
            rows = [row for piece in self._pieces for row in rows if _has(row, piece)]
        self.record = dataclasses.replace(self.record, rows=list(rows))

    def _take_over(self, before: Record, *, leaves_out: Sequence[str]) -> None:
        now = json.loads(json.dumps(dataclasses.asdict(self.record)))
        for what, was in (("settings", before.settings), ("versions", before.versions)):
            if was != now[what]:
                say(f"{self.path}: made with other {what}; begun anew")
                return
        notes = list(dict.fromkeys([*before.notes, *self.record.notes]))
        self.record = dataclasses.replace(self.record, notes=notes)
        self._set([row for row in before.rows if row.get("model") not in leaves_out])


def _has(row: Row, key: Mapping[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in key.items())


def run(
    start: Record,
    pieces: Sequence[Mapping[str, Any]],
    measure: Callable[[Mapping[str, Any]], Row | list[Row]],
    args: argparse.Namespace,
) -> int:
    """Fill and write `start`, piece by piece; returns the exit status.

    `pieces` name themselves by `piece` (for `--only`) or their first value; every row of a piece starts with the
    piece's keys.
    """
    wanted = [piece for piece in pieces if args.only is None or _name_of(piece) in args.only]
    if not wanted:
        known = ", ".join(dict.fromkeys(_name_of(piece) for piece in pieces))
        say(f"--only {' '.join(args.only)}: no such piece (known: {known})")
        return 2
    rows = Rows(start, folder=args.out, resumes=args.resume or args.only is not None, pieces=pieces)

    def fill() -> None:
        for place, piece in enumerate(wanted, start=1):
            label = f"{start.question} {place}/{len(wanted)} {', '.join(str(value) for value in piece.values())}"
            if args.resume and rows.of(piece) and not _error_of(rows.of(piece)):
                say(f"{label}: done before")
                continue
            started = time.perf_counter()
            found = _attempt(piece, measure)
            rows.put(piece, found)
            error = _error_of(found)
            say(f"{label}: {time.perf_counter() - started:.1f} s{error and '; ' + error}")

    from benchmarks.tables import text_table

    return answer(rows, fill, text_table, args) or int(bool(_error_of(rows.rows)))


def answer(
    rows: Rows, fill: Callable[[], None], table: Callable[[Sequence[Row]], str], args: argparse.Namespace
) -> int:
    """`fill` the rows, and print them; returns the exit status, which is that of an interruption if there was one."""
    status = 0
    try:
        fill()
    except KeyboardInterrupt:
        say(f"interrupted; {len(rows.rows)} rows are in {rows.path}; go on with --resume")
        status = _INTERRUPTED
    print(json.dumps(dataclasses.asdict(rows.record), indent=1) if args.json else table(rows.rows))
    return status


def _name_of(piece: Mapping[str, Any]) -> str:
    """What `--only` calls it."""
    return str(piece.get("piece", next(iter(piece.values()))))


def _error_of(rows: Sequence[Row]) -> str:
    """The first error among them, or nothing."""
    return next((str(row["error"]) for row in rows if row.get("error")), "")


def _attempt(piece: Mapping[str, Any], measure: Callable[[Mapping[str, Any]], Row | list[Row]]) -> list[Row]:
    try:
        rows = measure(piece)
    except Exception as error:  # what cannot run is reported, and the rest goes on
        return [{**piece, "error": f"{type(error).__name__}: {error}".strip()}]
    return [{**piece, **row} for row in (rows if isinstance(rows, list) else [rows])]
