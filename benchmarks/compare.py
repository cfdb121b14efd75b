"""Variants of one subject beside plain: what questions (a) and (c) share.

What: `Case` is a subject at a shape; `run_case` starts plain and then the variants, a few at a time, asks all for one
step per round, and gives one finished row per variant to `rows`. `answer_question` is what the commands have in common.
Why plain stays alive: ratios are taken to plain's step of the same round.
Cost: that of the steps. Not covered: anything that does not fit beside plain's process (`--together 1` on a device).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import methods, subjects
from benchmarks.children import CannotRunError, Child, median_of, prepare_server, ratios, run_rounds, say
from benchmarks.record import Record, hardware
from benchmarks.rows import Row, Rows, answer, command_of, parser

WORKER = "benchmarks.worker:start"
MIB = 2**20
Variant = tuple[str, float | None]
"""A method's name and its setting."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model at a shape."""

    model: str
    shape: dict[str, int]

    def key(self, method: str, setting: float | None) -> dict[str, Any]:
        """What its row of a variant is known by."""
        return {
            "model": self.model,
            "batch": self.shape["batch"],
            "sequence": self.shape["sequence"],
            "method": method,
            "setting": setting,
        }


def question_parser(question: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments of a question about subjects."""
    made = parser(question, description, only="MODEL")
    made.add_argument("--scale", choices=subjects.SCALES, help="default: small on a CPU, large elsewhere")
    made.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 elsewhere")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--limit", type=float, default=120, help="seconds that one child may take to prepare, or a step")
    return made


def fill_defaults(args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """Scale and dtype by device; `argv` for the record."""
    args.argv = list(sys.argv[1:] if argv is None else argv)
    is_cpu = args.device == "cpu"
    args.scale = args.scale or ("small" if is_cpu else "large")
    args.dtype = args.dtype or ("float32" if is_cpu else "bfloat16")


def chosen(wanted: Sequence[str] | None, known: Sequence[str], what: str) -> list[str]:
    """Those of `known` that `--only` and its like name; all without one. Ends the program for an unknown name."""
    unknown = [name for name in wanted or () if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what} '{unknown[0]}'; known: {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def blank_record(
    args: argparse.Namespace, *, question: str, title: str, notes: Sequence[str], **settings: Any
) -> Record:
    """A record without rows, for `Rows`."""
    return Record(
        question=question,
        title=title,
        kind="measured",
        command=command_of(question, args.argv),
        settings={"scale": args.scale, "dtype": args.dtype, "threads": args.threads, **settings},
        rows=[],
        notes=list(notes),
        hardware=hardware(args.device),
    )


def answer_question(
    args: argparse.Namespace, start: Record, fill: Callable[[Rows], None], table: Callable[[Sequence[Row]], str]
) -> int:
    """Begin `start`, or go on with it, and print what comes; returns the exit status."""
    rows = Rows(start, folder=args.out, resumes=args.resume, only=args.only)
    prepare_server()
    return answer(rows, lambda: fill(rows), table, args)


def arguments_of(case: Case, variant: Variant, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What a child of `worker.start` is told."""
    method, setting = variant
    given = {"model": case.model, "shape": case.shape, "method": method, "setting": setting}
    given |= {"device": args.device, "dtype": args.dtype, "threads": args.threads}
    return {**given, "budget_bytes": None, **more}


def run_case(
    case: Case, variants: Sequence[Variant], args: argparse.Namespace, rows: Rows, *, fits_all: bool = False
) -> None:
    """Fill `rows` with plain and `variants`. `fits_all`: budgets are four times plain's peak, whatever the setting.

    Uses `args.rounds`, `args.together` and `args.limit`. An error of a variant is its row; one of plain, everyone's.
    """
    missing = [variant for variant in variants if not rows.has(**case.key(*variant))]
    if not missing and rows.has(**case.key("plain", None)):
        return
    say(f"{case.model}, {case.shape['batch']} x {case.shape['sequence']}: {len(missing)} variants beside plain")
    plain = Child("plain", WORKER, arguments_of(case, ("plain", None), args, wants_profile=True))
    try:
        plain.start(args.limit)
        for first in range(0, len(missing), args.together):
            _run_group(case, plain, missing[first : first + args.together], args, rows, fits_all=fits_all)
    finally:
        plain.stop()


def _run_group(
    case: Case, plain: Child, group: Sequence[Variant], args: argparse.Namespace, rows: Rows, *, fits_all: bool
) -> None:
    children: list[tuple[Variant, Child]] = []
    try:
        for name, setting in group:
            method = methods.METHODS[name]
            budget = budget_bytes(plain, setting, fits_all) if method.needs_budget else None
            child = Child(method.title(setting), WORKER, arguments_of(case, (name, setting), args, budget_bytes=budget))
            children.append(((name, setting), child))
            if plain.error is not None:
                child.error = f"plain could not run: {plain.error}"
                continue
            child.start(args.limit * method.limit_factor)
            say(f"  {child.name}: {child.error or 'ready'}")
        offset = len(plain.steps)
        running = [child for _, child in children if child.error is None]
        run_rounds([plain, *running], args.rounds, args.limit)
        rows.add(finished_row(case.key("plain", None), plain, plain, 0, plain.ask("finish", args.limit)))
        for (name, setting), child in children:
            end = child.ask("finish", args.limit)
            rows.add(finished_row(case.key(name, setting), child, plain, offset, end))
    finally:
        for _, child in children:
            child.stop()


def budget_bytes(plain: Child, share: float | None, fits_all: bool) -> int:
    """The budget of a share of the activations: plain's peak less the rest of what plain autograd saves."""
    if plain.error is not None:
        return 0
    if fits_all or share is None:
        return 4 * int(plain.ready["peak_bytes"])
    return int(plain.ready["peak_bytes"] - (1 - share) * plain.ready["saved_bytes"])


def finished_row(
    key: dict[str, Any], child: Child, plain: Child, offset: int, end: dict[str, Any] | None
) -> dict[str, Any]:
    """One row: ratios first. See `record.Record` for what a reader may expect of its keys."""
    method = methods.METHODS[key["method"]]
    row = {**key, "title": method.title(key["setting"]), "package": child.ready.get("package"), "error": child.error}
    if child.error is not None:
        row["package"] = row["package"] or _package(method)
        return row
    seconds = [step["seconds"] for step in child.steps[1:]]
    peak = max([child.ready["peak_bytes"], *(step.get("peak_bytes", 0) for step in child.steps)])
    losses_agree = all(step["loss"] == other["loss"] for step, other in zip(child.steps, plain.steps[offset:]))
    checks = [child.ready.get("is_equal"), (end or {}).get("is_equal")]
    row |= ratios(child, plain, offset)
    row |= {
        "is_equal": None if None in checks else all(checks) and losses_agree,
        "is_exact": method.is_exact,
        "seconds_median": median_of(child, "seconds"),
        "seconds_min": min(seconds, default=None),
        "seconds_max": max(seconds, default=None),
        "cpu_seconds_median": median_of(child, "cpu_seconds"),
        "cpu_ratio_median": ratios(child, plain, offset, "cpu_seconds").get("ratio_median"),
        "peak_bytes": peak,
        "saved_bytes": plain.ready["peak_bytes"] - child.ready["peak_bytes"],
        "activation_bytes": plain.ready["saved_bytes"],
        "saved_share": (plain.ready["peak_bytes"] - child.ready["peak_bytes"]) / max(plain.ready["saved_bytes"], 1),
    }
    for name in ("peak_resident_bytes", "copied_bytes", "stall_seconds", "pinned_bytes", "torch_pinned_bytes",
                 "swapped_bytes", "recomputed_bytes", "disk_bytes", "reserved_bytes", "driver_bytes"):  # fmt: skip
        row[name] = median_of(child, name)
    if "budget_bytes" in child.ready:
        row["is_within_budget"] = peak <= child.ready["budget_bytes"]
    told = {name: value for name, value in child.ready.items() if name not in ("peak_bytes", "is_equal", "saved_bytes")}
    return {**told, **row, "num_rounds": len(child.steps)}


def _package(method: methods.Method) -> str | None:
    try:
        return methods.version_of(method)
    except CannotRunError:
        return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people: ratios first."""
    lines = [
        f"{'variant':<40}{'x plain (min-max)':>20}{'s/step':>8}{'peak MiB':>10}{'saved':>7}{'resident':>10}  equal"
    ]
    before = None
    for row in rows:
        heading = f"{row['model']}, {row['batch']} x {row['sequence']}"
        if heading != before:
            lines.append(f"-- {heading}")
            before = heading
        lines.append(_line(row))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return f"{row['title']:<40}  {row['error']}"
    if "ratio_median" not in row:
        return f"{row['title']:<40}  one round only: no ratio"
    spread = f"{row['ratio_median']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
    resident = row["peak_resident_bytes"]
    equal = {True: "yes", False: f"no, {row['difference']:.0e}", None: "unknown"}[row["is_equal"]]
    return (
        f"{row['title']:<40}{spread:>20}{row['seconds_median']:>8.2f}{row['peak_bytes'] / MIB:>10.0f}"
        f"{row['saved_share']:>7.0%}{(resident or 0) / MIB:>10.0f}  {equal}"
        + ("" if row.get("is_within_budget", True) else ", OVER ITS BUDGET")
    )
