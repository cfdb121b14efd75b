"""`lowtide report RUN_DIR`: what a run of `lowtide train` did, as one HTML file, a trace, or data.

Exit status: 0, or 2 for a mistake.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.cli.waiting import Waiting
from lowtide.report.write import check_form


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="train.output_dir of the run; it may still go on")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write there instead of RUN_DIR/report.html: .html, .trace.json (Perfetto), .pickle (memory_viz), .json",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the report, and prints where it is. Raises `ConfigError` for mistakes."""
    path = args.out or args.run_dir / "report.html"
    check_form(path)
    with Waiting() as waiting:
        waiting.say("drawing")
        from lowtide.report.run_folder import report_of_folder
        from lowtide.report.write import write_report

        write_report(report_of_folder(args.run_dir), path)
    print(path)
    return 0
