"""`lowtide doctor`: whether this machine is ready, what is in the way, and how to mend it.

Exit status: 0; 1 if something is bad; 2 for a mistake in the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.cli.waiting import Waiting, width_of_stdout
from lowtide.core.text_table import wrapped

if TYPE_CHECKING:
    from lowtide.report.doctor import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disk", metavar="PATH", help="the directory to swap to, as memory.disk_path")
    parser.add_argument("--no-measure", action="store_true", help="leave out the link, which takes about two seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the findings."""
    with Waiting() as waiting:
        waiting.say("loading torch")
        from lowtide.report.doctor import examine

        findings = list(examine(args.disk, measures=not args.no_measure, say=waiting.say))
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        print("\n".join(_lines(findings, width_of_stdout())))
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def _lines(findings: Sequence[Finding], width: int | None) -> list[str]:
    widest = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<4}  {finding.what:<{widest}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{widest}}  -> {finding.advice}")
    return wrapped(lines, width, indent=" " * (widest + 8))
