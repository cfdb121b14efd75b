"""The short commands: `doctor`, `export`, `report` and `train`.

What: `lowtide doctor` says whether this machine is ready, what is in the way, and how to mend it (exit status 1 if
something is bad). `lowtide export PLAN.json --to SYSTEM --profile FILE` prints the nearest setting that another
framework has, after what it cannot say as comments; it needs no model and no torch. `lowtide report RUN_DIR` writes
what a run of the trainer did as one HTML file, a trace, or data. `lowtide train RUN.yaml` is the door to the trainer of
the examples, where the clone is at hand: lowtide is no trainer.
Exit status: 0, or 2 for a mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.plan import check_writable, read_plan, read_profile
from lowtide.cli.waiting import Waiting, width_of_stdout
from lowtide.config.source import write_file
from lowtide.core.text_table import wrapped
from lowtide.errors import ConfigError
from lowtide.report.export import export as setting_of
from lowtide.report.write import check_form, write_report
from lowtide.timeline.hardware import load_hardware

if TYPE_CHECKING:
    from lowtide.report.doctor import Finding

_CLONE = Path(__file__).parents[2]


def doctor(args: argparse.Namespace) -> int:
    """Prints the findings."""
    with Waiting() as waiting:
        waiting.say("loading torch")
        from lowtide.report.doctor import examine

        findings = list(examine(args.disk, measures=not args.no_measure, say=waiting.say))
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) | {"state": finding.state} for finding in findings]))
    else:
        print("\n".join(_findings(findings, width_of_stdout())))
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def _findings(findings: Sequence[Finding], width: int | None) -> list[str]:
    widest = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<4}  {finding.what:<{widest}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{widest}}  -> {finding.advice}")
    return wrapped(lines, width, indent=" " * (widest + 8))


def export(args: argparse.Namespace) -> int:
    """Prints, or writes, the setting. Raises `ConfigError` for mistakes."""
    plan, profile = read_plan(args.plan), read_profile(args.profile)
    if args.hardware is None and not profile.is_fake:
        raise ConfigError(
            f"--hardware: the profile was observed on {profile.device}, and says nothing of the link of that machine; "
            "name its hardware, such as --hardware h200"
        )
    check_writable(args.out)
    text = setting_of(plan, args.to, profile, link=load_hardware(args.hardware or profile.device).link)
    if args.out is not None:
        write_file(args.out, text, where="--out")
    else:
        print(text, end="")
    return 0


def report(args: argparse.Namespace) -> int:
    """Writes the report, and prints where it is. Raises `ConfigError` for mistakes."""
    path = args.out or args.run_dir / "report.html"
    check_form(path)
    with Waiting() as waiting:
        waiting.say("reading the run, and drawing it")
        from lowtide.report.run_folder import report_of_folder

        write_report(report_of_folder(args.run_dir), path)
    print(path)
    return 0


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the example; without it there is nothing to run."""
    if not (_CLONE / "examples" / "train").is_dir():
        raise ConfigError(
            "lowtide train: the trainer is an example and not in this installation; in a clone of lowtide's repository "
            "write: python -m examples.train RUN.yaml"
        )
    sys.path.insert(0, str(_CLONE))
    importlib.import_module("examples.train.__main__").add_arguments(parser)


def train(args: argparse.Namespace) -> int:
    return int(importlib.import_module("examples.train.__main__").run(args))
