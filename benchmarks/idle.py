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
import dataclasses
import json
import sys
from collections.abc import Sequence

from benchmarks import subjects
from benchmarks.children import prepare_server, say
from benchmarks.compare import Case, Variant, add_arguments, blank_record, chosen, fill_defaults, run_case, table
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help=f"of {', '.join(subjects.NAMES)}")
    parser.add_argument("--all", action="store_true", help="every model, on a CPU too")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    fill_defaults(args)
    args.together = len(VARIANTS)
    rows = Rows(
        blank_record(args, question=QUESTION, title=TITLE, notes=NOTES, num_rounds=args.rounds),
        folder=args.folder,
        resumes=args.resume,
        only=args.only,
    )
    prepare_server()
    try:
        for case in cases(args):
            run_case(case, VARIANTS, args, rows, fits_all=True)
    except KeyboardInterrupt:
        say(f"interrupted; {len(rows.rows)} rows are in {rows.path}; go on with --resume")
        return 130
    print(json.dumps(dataclasses.asdict(rows.record), indent=1) if args.json else table(rows.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
