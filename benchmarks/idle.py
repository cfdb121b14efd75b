"""Question (c): what does lowtide cost where it has nothing to do?

    python -m benchmarks.idle [--only gpt2 ...] [--rounds 20] [--device cuda] [--resume]

Beside plain eager: plain once more (what two equal processes differ by here), `lowtide.apply` with an empty plan, whose
hooks see every saved tensor and keep it, and `lowtide.optimize` with a budget of four times plain's peak, which plans,
finds that everything fits, and says so. The tiny models are the worst case: their operators take microseconds, so the
hooks' share of a step is as large as it can be.

Reported: as in `time_against_memory`, with more rounds; ratios to plain's step of the same round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import subjects
from benchmarks.compare import (
    Case,
    Variant,
    answer_question,
    blank_record,
    chosen,
    fill_defaults,
    question_parser,
    run_case,
    table,
)
from benchmarks.rows import Rows

QUESTION = "idle"
TITLE = "What does lowtide cost where it has nothing to do?"
VARIANTS: list[Variant] = [("plain, a second process", None), ("lowtide keep", None), ("lowtide", None)]
NOTES = ("'plain, a second process' is the noise of this measurement: the same code beside itself.",)


def cases(args: argparse.Namespace) -> list[Case]:
    """The models at their scale, and two at the smallest."""
    names = chosen(args.only, subjects.NAMES, "model")
    if args.only is None and args.device == "cpu" and not args.all:
        names = ["llama", "gpt2"]
    found = [Case(name, subjects.shape(name, args.scale)) for name in names]
    if args.scale != "tiny":
        found += [Case(name, subjects.shape(name, "tiny")) for name in names]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = question_parser(QUESTION, __doc__)
    parser.add_argument("--all", action="store_true", help="every model, on a CPU too")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args(argv)
    fill_defaults(args, argv)
    args.together = len(VARIANTS)

    def fill(rows: Rows) -> None:
        for case in cases(args):
            run_case(case, VARIANTS, args, rows, fits_all=True)

    return answer_question(
        args, blank_record(args, question=QUESTION, title=TITLE, notes=NOTES, num_rounds=args.rounds), fill, table
    )


if __name__ == "__main__":
    sys.exit(main())
