"""The manners that all benchmarks share: pieces, rows written as they come, resuming, errors that are rows.

What: a benchmark is a row of *pieces* (a model, a method, a size), each named by a small mapping, and a function that
turns one piece into one or more rows. `run` does them in order, writes the record after each, says what it does on
stderr, and prints the table, or with `--json` the record, at the end.
Why: what ran for an hour must survive a Ctrl-C, a machine that is taken away, and one method that cannot run.
Cost: a small file written per piece. Not covered: pieces that run side by side.

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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, Record, read, write

Row = dict[str, Any]
_NOT_OF_THE_COMMAND = ("--resume", "--json")
_WITH_VALUES = ("--only", "--out")
_INTERRUPTED = 130


def parser(module: str, description: str | None, *, device: str = "cpu") -> argparse.ArgumentParser:
    """The arguments that every benchmark has. `description` is the module's docstring."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", default=device, help="where it runs: cpu, cuda, npu, ...")
    made.add_argument("--resume", action="store_true", help="keep what an earlier run has found, do the rest")
    made.add_argument("--only", nargs="+", metavar="NAME", help="these pieces alone; the others keep their rows")
    made.add_argument("--json", action="store_true", help="print the record instead of the table")
    made.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results/ is")
    return made


def command_of(args: argparse.Namespace, module: str, argv: Sequence[str]) -> str:
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


def run(
    record: Record,
    pieces: Sequence[Mapping[str, Any]],
    measure: Callable[[Mapping[str, Any]], Row | list[Row]],
    args: argparse.Namespace,
) -> int:
    """Fill and write `record`, piece by piece; returns the exit status.

    `pieces` name themselves by `piece` (for `--only`) or their first value; every row of a piece starts with the
    piece's keys. `record.rows` must be empty.
    """
    sheet = Sheet(record, pieces, args.out)
    wanted = [piece for piece in pieces if args.only is None or name_of(piece) in args.only]
    if not wanted:
        known = ", ".join(dict.fromkeys(name_of(piece) for piece in pieces))
        say(f"--only {' '.join(args.only)}: no such piece (known: {known})")
        return 2
    if args.resume or args.only is not None:
        sheet.take_over()
    status = 0
    try:
        for place, piece in enumerate(wanted, start=1):
            label = f"{record.question} {place}/{len(wanted)} {', '.join(str(value) for value in piece.values())}"
            if args.resume and sheet.is_done(piece):
                say(f"{label}: done before")
                continue
            started = time.perf_counter()
            sheet.put(piece, _attempt(piece, measure))
            say(f"{label}: {time.perf_counter() - started:.1f} s{sheet.error_of(piece)}")
    except KeyboardInterrupt:
        say(f"{record.question}: interrupted; what is done is in {sheet.place}")
        status = _INTERRUPTED
    _show(sheet.record, args.json)
    return status or (1 if any(row.get("error") for row in sheet.record.rows) else 0)


def say(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def name_of(piece: Mapping[str, Any]) -> str:
    """What `--only` calls it."""
    return str(piece.get("piece", next(iter(piece.values()))))


class Sheet:
    """The rows so far, in the order of the pieces, and the file that has them."""

    def __init__(self, record: Record, pieces: Sequence[Mapping[str, Any]], folder: Path) -> None:
        assert not record.rows
        self.record = record
        self.place = folder / record.hardware["folder"] / f"{record.question}.json"
        self._folder = folder
        self._rows: dict[str, list[Row]] = {_key(piece): [] for piece in pieces}
        self._pieces = pieces

    def take_over(self) -> None:
        """Keep the rows of an earlier run of the same settings and versions."""
        if not self.place.exists():
            return
        before = read(self.place)
        now = json.loads(json.dumps(dataclasses.asdict(self.record)))
        for what, was in (("settings", before.settings), ("versions", before.versions)):
            if was != now[what]:
                say(f"{self.record.question}: other {what} than in {self.place}; starting anew")
                return
        for piece in self._pieces:
            self._rows[_key(piece)] = [row for row in before.rows if piece.items() <= row.items()]
        self._flatten()

    def is_done(self, piece: Mapping[str, Any]) -> bool:
        """It has rows, and none of them failed."""
        rows = self._rows[_key(piece)]
        return bool(rows) and not any(row.get("error") for row in rows)

    def put(self, piece: Mapping[str, Any], rows: list[Row]) -> None:
        """Replace the rows of a piece, and write the file."""
        self._rows[_key(piece)] = rows
        self._flatten()
        write(self.record, self._folder)

    def _flatten(self) -> None:
        flat = [row for piece_rows in self._rows.values() for row in piece_rows]
        self.record = dataclasses.replace(self.record, rows=flat)

    def error_of(self, piece: Mapping[str, Any]) -> str:
        """For the line of progress: nothing, or what went wrong."""
        errors = [str(row["error"]) for row in self._rows[_key(piece)] if row.get("error")]
        return f"; {errors[0]}" if errors else ""


def _key(piece: Mapping[str, Any]) -> str:
    return json.dumps(piece, sort_keys=True)


def _attempt(piece: Mapping[str, Any], measure: Callable[[Mapping[str, Any]], Row | list[Row]]) -> list[Row]:
    try:
        rows = measure(piece)
    except Exception as error:  # what cannot run is reported, and the rest goes on
        return [{**piece, "error": f"{type(error).__name__}: {error}".strip()}]
    return [{**piece, **row} for row in (rows if isinstance(rows, list) else [rows])]


def _show(record: Record, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(record), indent=1))
        return
    from benchmarks.tables import text_table

    print(text_table(record.rows))
