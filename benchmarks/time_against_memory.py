"""Question (a): what does a step cost at a share of its activation memory, beside what people do today?

    python -m benchmarks.time_against_memory [--only llama ...] [--device cuda --sequence 8192 --together 1] [--resume]

For each model plain eager is the base; every other method (methods.py) runs beside it, one step each in turn, and is
checked against it: loss and gradients to the bit. lowtide gets budgets: the budget of a share s is plain's peak less
(1 - s) of the bytes that plain autograd saves. A method that cannot run has its error in its row.

Reported: seconds a step as a ratio to plain round by round (median, minimum, maximum), the peak (see worker.py), the
share of the activations that is gone from the peak, resident memory, bytes copied, stalls, pinned bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import methods, subjects
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

QUESTION = "time_against_memory"
TITLE = "What does a step cost at a share of its activation memory?"
_CHEAP: list[Variant] = [
    ("layer checkpointing", None),
    ("every n-th layer", 2.0),
    ("selective: matmuls kept", None),
    ("selective: attention kept", None),
    ("save_on_cpu", None),
    ("torchtune offloading", None),
    ("trl offloading", None),
    ("torch sac_ilp", 0.5),
]
_OFTEN = ("llama",)
"""Models that are asked at more shares, and under torch.compile, on a CPU too."""
_LENGTHS = {("llama", "large"): (4096, 8192, 32768)}
NOTES = (
    "The optimizers of torchao (CPU offload) and bitsandbytes (paged) move optimizer state: they belong to another "
    "question.",
    "save_on_cpu moves nothing on a CPU: what it saves is there already.",
    "torch.compile's peak on a CPU is counted from the allocator's own events and includes temporaries inside "
    "operators; the others' is an audit of live tensors.",
)


def variants_of(model: str, args: argparse.Namespace) -> list[Variant]:
    """What runs beside plain for `model`, in the order of the table."""
    is_full = args.all or args.device != "cpu" or model in _OFTEN
    shares = args.shares or ([0.7, 0.5, 0.3, 0.1] if is_full else [0.5, 0.3])
    fewest = [share for share in shares if 0.2 < share < 0.6] or shares[:1]
    found = [*_CHEAP]
    if args.device != "cpu":
        found.append(("layer checkpointing, inputs offloaded", None))
    found += [("torch.compile budget", 0.5)] if is_full else []
    found += [("fewest layers that fit", share) for share in fewest]
    found += [("lowtide", share) for share in shares]
    return [variant for variant in found if not args.methods or variant[0] in args.methods]


def main(argv: Sequence[str] | None = None) -> int:
    parser = question_parser(QUESTION, __doc__)
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="by name; default: all")
    parser.add_argument(
        "--shares", type=float, nargs="+", help="of the activations; default: 0.7 0.5 0.3 0.1, fewer on a CPU"
    )
    parser.add_argument("--all", action="store_true", help="everything for every model, on a CPU too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int, help="variants alive beside plain; default: 6 on a CPU, 1 elsewhere")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--sequence", type=int, nargs="+", help="tokens; default for llama on a device: 4k, 8k, 32k")
    args = parser.parse_args(argv)
    fill_defaults(args, argv)
    args.together = args.together or (6 if args.device == "cpu" else 1)
    chosen(args.methods, list(methods.METHODS), "method")
    notes = list(NOTES)
    if args.device == "cpu" and not args.all:
        notes.append(
            "For time, models other than llama are asked at two shares and not under torch.compile; --all asks all."
        )

    def fill(rows: Rows) -> None:
        for model in chosen(args.only, subjects.NAMES, "model"):
            for length in args.sequence or _LENGTHS.get((model, args.scale), (None,)):
                overrides = {"layers": args.layers, "batch": args.batch, "sequence": length}
                case = Case(model, subjects.shape(model, args.scale, overrides))
                run_case(case, variants_of(model, args), args, rows)

    return answer_question(
        args, blank_record(args, question=QUESTION, title=TITLE, notes=notes, num_rounds=args.rounds), fill, table
    )


if __name__ == "__main__":
    sys.exit(main())
