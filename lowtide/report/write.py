"""A report into a file, in the form that the file's name asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lowtide.errors import ConfigError
from lowtide.report.report import Report, document

FORMS = (".html", ".trace.json", ".json")


def check_form(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a name that asks for no form."""
    if not os.fspath(path).endswith(FORMS):
        raise ConfigError(
            f"report: {os.fspath(path)}: write to a file that ends in {', '.join(FORMS[:-1])} or {FORMS[-1]}"
        )


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write `report` as HTML, as a trace for Perfetto, or as JSON. Raises ConfigError where that cannot be."""
    check_form(path)
    name = os.fspath(path)
    if name.endswith(".html"):
        from lowtide.report.page import page

        text = page(report)
    elif name.endswith(".trace.json"):
        from lowtide.report.trace import trace

        if report.played is None:
            raise ConfigError(f"report: {name}: there is no step to trace; write HTML or JSON")
        text = json.dumps(trace(report.played, report.title))
    else:
        text = json.dumps(document(report), indent=1)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report: {name} cannot be written: {error.strerror}") from None
    return Path(path)
