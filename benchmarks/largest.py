"""Question (b): what is the largest batch, and the longest sequence, that trains in a fixed budget, by method?

    python -m benchmarks.largest [--only llama] [--methods lowtide plain] [--device cuda] [--resume]
    python -m benchmarks.largest --vocabulary 32768 --optimizer adamw

The budget is the peak of plain eager at the shape of the subject, so plain's answer is that shape. Every method is
asked for more: a size fits if a step's measured peak (see worker.py) is within the budget. The peak is almost a line
in the size, so the next size to try is guessed from the last two and then closed in on; each try is a real step in a
child process. At the answer, loss and gradients are compared with plain's, where plain can run without the budget.

It is asked twice: of forward and backward alone, and of a model whose vocabulary makes the loss large enough for
slices, with an optimizer whose state counts and which lowtide may move (`memory.optimizer: auto`). `--vocabulary` or
`--optimizer` ask one question of one's own instead.

Reported: the size, its ratio to plain's, the peak there, the time of one step there and of a token of it, how many
sizes were tried; of lowtide also whether the loss was taken in slices, and how many bytes of the optimizer's state were
moved.
Not covered: fragmentation (a real device may run out of memory below the budget); the driver's own memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import methods, subjects
from benchmarks.children import Child, say
from benchmarks.compare import (
    MIB,
    Case,
    Variant,
    answer_question,
    arguments_of,
    blank_record,
    chosen,
    fill_defaults,
    question_parser,
)
from benchmarks.rows import Rows

QUESTION = "largest"
TITLE = "What is the largest batch, and the longest sequence, that trains in a fixed budget?"
WORKER = "benchmarks.try_sizes:start"
MEASURES = ("batch", "sequence")
WHOLE_STEPS = (16384, "adamw")
"""Words and optimizer of the second question, at the scale of a CPU."""
OF_IMAGES = ("vit", "unet")
VARIANTS: list[Variant] = [
    ("layer checkpointing", None),
    (methods.TILED, None),
    ("selective: matmuls kept", None),
    ("selective: attention kept", None),
    ("save_on_cpu", None),
    ("torchtune offloading", None),
    ("trl offloading", None),
    ("lowtide", None),
    ("lowtide, loss in blocks", None),
    ("lowtide, layers in blocks", None),
]
NOTES = (
    "A method with a budget (lowtide) is given the budget; the others have no knob and are measured.",
    "save_on_cpu moves nothing on a CPU.",
)


def run_measure(
    case: Case, measure: str, variants: list[Variant], args: argparse.Namespace, rows: Rows, *, optimizer: str
) -> None:
    """Rows of one model for one measure: plain's, which sets the budget, and those of `variants`."""
    start = case.shape[measure]
    unit = 1 if measure == "batch" else args.unit
    wanted = [("plain", None), *variants]
    asked = {"model": case.model, "vocabulary": case.shape.get("vocabulary"), "optimizer": optimizer}
    missing = [v for v in wanted if not rows.has(**asked, method=v[0], measure=measure)]
    if not missing:
        return
    say(f"{_name(asked)}: the largest {measure}, for {len(missing)} methods")
    same = (row for row in rows.rows if all(row[name] == value for name, value in asked.items()))
    budget = next((row["budget_bytes"] for row in same if "budget_bytes" in row), None)
    for name, setting in missing:
        key = {**asked, "method": name, "title": methods.METHODS[name].title(None), "setting": None,
               "measure": measure, "start": start}  # fmt: skip
        if budget is None and name != "plain":
            rows.add({**key, "error": "plain could not run, so there is no budget"})
            continue
        told = arguments_of(case, (name, setting), args, budget_bytes=budget, measure=measure, unit=unit)
        told["optimizer"] = optimizer
        child = Child(name, WORKER, {**told, "most": start * args.most, "seconds": args.limit * 0.8})
        try:
            child.start(args.limit)
            answer = child.ask("first" if name == "plain" else "find", args.limit)
        finally:
            child.stop()
        row = {
            **key,
            "package": child.ready.get("package"),
            "error": child.error,
            **(answer or {}),
        }
        if name == "plain" and answer is not None:
            budget = answer["peak_bytes"]
        if answer is not None:
            row |= {"budget_bytes": budget, "ratio_median": answer["size"] / start}
            row["tokens"] = case.shape["batch"] * case.shape["sequence"] // start * answer["size"]
        rows.add(row)
        say(f"  {name}: {row.get('size') or row['error']}")


def _name(row: Mapping[str, Any]) -> str:
    words = "" if row.get("vocabulary") is None else f", {row['vocabulary']:,} words"
    return row["model"] + words + ("" if row.get("optimizer") in (None, "none") else f", {row['optimizer']}")


def find_largest(
    peak_at: Callable[[int], int | None], *, budget_bytes: int, start: int, most: int, closeness: float = 0.01
) -> tuple[int, Mapping[int, int | None]]:
    """The largest size up to `most` whose peak is within the budget, and every peak that was measured.

    `peak_at(size)` is bytes, or None where it cannot run at all. Peaks must not fall with the size. Sizes are searched
    until the largest that fits and the smallest that does not are next to each other or within `closeness`. 0 if not
    even `start`, halved repeatedly, fits.
    """
    peaks: dict[int, int | None] = {}
    fits, fails = 0, most + 1
    size = min(start, most)
    while size is not None:
        peaks[size] = peak_at(size)
        peak = peaks[size]
        if peak is not None and peak <= budget_bytes:
            fits = max(fits, size)
        else:
            fails = min(fails, size)
        size = _next_size(peaks, fits, fails, budget_bytes, closeness)
    return fits, peaks


def _next_size(
    peaks: Mapping[int, int | None], fits: int, fails: int, budget_bytes: int, closeness: float
) -> int | None:
    if fails - fits <= 1 or (fits and fails - fits <= closeness * fits):
        return None
    if not fits:
        return fails // 2
    known = sorted((size, peak) for size, peak in peaks.items() if peak is not None)
    guess = 2 * fits
    if len(known) >= 2:
        (low, low_bytes), (high, high_bytes) = known[-2:]
        slope = (high_bytes - low_bytes) / (high - low)
        guess = int(low + (budget_bytes - low_bytes) / slope) if slope > 0 else 2 * fits
    if fits < guess < fails:
        return guess if guess not in peaks else (fits + fails) // 2
    # The line says that the answer is next to what is known: prove it, else halve.
    if guess <= fits and fits + 1 not in peaks:
        return fits + 1
    return min((fits + fails) // 2, 4 * fits)


def table(rows: Any) -> str:
    """The rows for people."""
    lines = [
        f"{'method':<34}{'x plain':>9}{'size':>8}{'peak MiB':>10}{'budget':>8}{'s/step':>8}{'ms/token':>10}"
        "  equal  loss    moved MiB"
    ]
    before = None
    for row in rows:
        heading = f"{_name(row)}, {row['measure']}"
        if heading != before:
            lines.append(f"-- largest {heading}")
            before = heading
        if row["error"] is not None:
            lines.append(f"{row['title']:<34}  {row['error']}")
            continue
        equal = {True: "yes", False: "no", None: "unknown"}[row["is_equal"]]
        token = f"{1000 * row['seconds'] / row['tokens']:.2f}" if "tokens" in row else ""
        lines.append(
            f"{row['title']:<34}{row['ratio_median']:>9.2f}{row['size']:>8}{row['peak_bytes'] / MIB:>10.0f}"
            f"{row['budget_bytes'] / MIB:>8.0f}{row['seconds']:>8.2f}{token:>10}  {equal:<7}{row.get('loss', ''):<8}"
            + (f"{row['state_bytes_moved'] / MIB:>8.0f}" if row.get("state_bytes_moved") is not None else "")
        )
    return "\n".join(lines)


def case_of(model: str, args: argparse.Namespace, vocabulary: int | None) -> Case:
    """Smaller than the other questions' on a CPU: what is looked for is several times as large."""
    shape = subjects.shape(model, args.scale, {"layers": args.layers, "batch": args.batch, "sequence": args.sequence})
    if args.scale == "small":
        small = {"batch": args.batch or 4, "sequence": args.sequence or 128, "hidden": 256, "heads": 4}
        shape |= {**small, "intermediate": shape["intermediate"] // 2}
    if vocabulary is not None:
        shape["vocabulary"] = vocabulary
    return Case(model, shape)


def main(argv: Sequence[str] | None = None) -> int:
    parser = question_parser(QUESTION, __doc__)
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="by name; default: all")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--unit", type=int, default=16, help="sequences are multiples of this many tokens")
    parser.add_argument("--most", type=int, default=32, help="no size beyond this many times plain's is tried")
    parser.add_argument("--vocabulary", type=int, help="words of models of text")
    parser.add_argument("--optimizer", choices=("none", "adamw"))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--sequence", type=int)
    parser.set_defaults(limit=240)  # one order looks for a size: many steps
    args = parser.parse_args(argv)
    fill_defaults(args, argv)
    known = [name for name, _ in VARIANTS] + ["plain", "torch.compile budget"]
    asked = chosen(args.methods, known, "method")
    variants = [variant for variant in VARIANTS if variant[0] in asked]
    notes = [*NOTES, "torch.compile compiles anew for every size; it is not asked."]
    models = chosen(args.only, subjects.NAMES, "model")
    if args.only is None and args.device == "cpu":
        models = ["llama"]
        notes.append("For time, on a CPU one model is asked; --only names others.")

    asked_of: list[tuple[int | None, str]] = [(args.vocabulary, args.optimizer or "none")]
    if args.vocabulary is None and args.optimizer is None and args.scale == "small":
        asked_of.append(WHOLE_STEPS)

    def fill(rows: Rows) -> None:
        for model in models:
            for vocabulary, optimizer in asked_of:
                for measure in args.measures:
                    if measure == "sequence" and model in OF_IMAGES:
                        continue  # their sequence is the image
                    case = case_of(model, args, None if model in OF_IMAGES else vocabulary)
                    run_measure(case, measure, variants, args, rows, optimizer=optimizer)

    return answer_question(args, blank_record(args, question=QUESTION, title=TITLE, notes=notes), fill, table)


if __name__ == "__main__":
    sys.exit(main())
