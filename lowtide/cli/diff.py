"""`lowtide diff A.json B.json`: what the second plan does otherwise than the first.

Reads two plans that `lowtide plan --out` or `Plan.to_json` wrote; needs no model and no torch. Exit status, as for
`diff`: 0 if both do the same, 1 if not, 2 for a mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from lowtide.cli.terminal import width_of_stdout
from lowtide.config.source import read_text
from lowtide.core.plan import Plan
from lowtide.errors import ConfigError
from lowtide.report.plan_diff import diff_lines, plan_diff

_MOST_BYTES = 1 << 28
"""A plan of 1,000 layers has some 20 MB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json", help="a plan, as `lowtide plan --out` writes it")
    parser.add_argument("second", type=Path, metavar="B.json", help="another one")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the difference. Raises `ConfigError` for a file that is no plan."""
    diff = plan_diff(read_plan(args.first), read_plan(args.second))
    if args.json:
        print(json.dumps({**dataclasses.asdict(diff), "is_same": diff.is_same}))
    else:
        print("\n".join(diff_lines(diff, *_names(args.first, args.second), width_of_stdout())))
    return 0 if diff.is_same else 1


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises `ConfigError`, with the path, for one that is none."""
    text = read_text(path, most_bytes=_MOST_BYTES)
    try:
        return Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _names(first: Path, second: Path) -> tuple[str, str]:
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))
