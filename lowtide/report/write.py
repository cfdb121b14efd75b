"""A report into a file, in the form that the file's name asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lowtide.errors import ConfigError, wrong_argument
from lowtide.report.played_step import Played
from lowtide.report.report import Report, document

FORMS = (".html", ".trace.json", ".json", ".pickle")


def check_form(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a name that asks for no form."""
    if not isinstance(path, str | os.PathLike):
        raise wrong_argument("lowtide.write_report", "path", "the path of a file", path)
    if not os.fspath(path).endswith(FORMS):
        raise ConfigError(
            f"report: {os.fspath(path)}: write to a file that ends in {', '.join(FORMS[:-1])} or {FORMS[-1]}"
        )


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write `report` as HTML, as a trace for Perfetto, as a memory snapshot for PyTorch's viewer, or as JSON. Raises
    ConfigError where that cannot be."""
    check_form(path)
    try:
        Path(path).write_bytes(_content(report, os.fspath(path)))
    except OSError as error:
        raise ConfigError(
            f"report: {os.fspath(path)} cannot be written: {error.strerror}; choose another file"
        ) from None
    return Path(path)


def _content(report: Report, name: str) -> bytes:
    if name.endswith(".html"):
        from lowtide.report.page import page

        return page(report).encode()
    if name.endswith(".trace.json"):
        from lowtide.report.trace import trace, trace_of_ranks

        if report.ranks:
            return json.dumps(trace_of_ranks(report.ranks, report.title)).encode()
        return json.dumps(trace(_step_of(report, name), report.title)).encode()
    if name.endswith(".pickle"):
        from lowtide.report.memory_snapshot import snapshot, to_bytes

        return to_bytes(snapshot([_step_of(report, name)]))
    return json.dumps(document(report), indent=1).encode()


def _step_of(report: Report, name: str) -> Played:
    if report.played is None:
        raise ConfigError(f"report: {name}: only a plan for a budget has a step on the clock; write .html or .json")
    return report.played
