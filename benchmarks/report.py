"""RESULTS.md, the plots and the table of docs/benchmarks.md, from the records alone.

    python -m benchmarks.report            # writes them
    python -m benchmarks.report --check    # writes nothing; exit status 1 if they are not what the records say

What: each question has a section, each hardware in it a table with the command and the versions that made it. Plots are
SVG files beside the records (plots.py; needs matplotlib, which `make bench` installs; without it they are left alone).
Why: nothing stands in a table that no run has written down, and the same records give the same bytes.
Cost: a second or two. Not covered: judging the numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import emulated
from benchmarks.agreement import summary
from benchmarks.published_run import with_gains
from benchmarks.record import RESULTS, Record, read_all
from benchmarks.tables import Column, columns, label_of, markdown_table, value_text

PAGE = RESULTS.parent / "RESULTS.md"
GUIDE = RESULTS.parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
QUESTIONS = {
    "time_against_memory": "What does a step cost at less activation memory?",
    "largest": "What is the largest model, batch or sequence that fits?",
    "idle": "What does lowtide cost where it has nothing to do?",
    "predicted": "Are peak and step time as predicted, over random plans and budgets?",
    "emulated": "EMULATED, not measured: does the accelerator engine do what the timeline says?",
    "planning_time": "How long does planning take as models grow?",
    "published_setting": "What does a plan gain over full recompute in the published setting?",
    "published_runs": "Does lowtide predict what others measured?",
    "scaling": "How does DeepSeek-V3 scale from 1 to 16,384 devices?",
    "optimizer": "What does it cost to have the optimizer's state elsewhere between steps?",
    "overlap": "How much of the all-to-all does the overlap engine hide?",
    "overlap_pipeline": "How much of the all-to-all does a whole step of DualPipeV hide?",
    "pipelines": "What does a pipeline of torch's take under lowtide?",
    "details": "What do hooks, copies and allocators cost?",
}
"""In the order of the page; questions that are not named here follow."""
NOT_BUILT = {
    "pipeline_schedules": "How large are the bubbles of pipeline schedules, predicted and real?",
}
KINDS = {
    "measured": "measured: a clock and counters",
    "emulated": "EMULATED: measured, but something was slowed down or stood in for",
    "computed": "COMPUTED: by the timeline or by formulas; nothing ran",
}
_SIDE_BY_SIDE = ("time_against_memory", "idle")
_SHORT = ("model", "title", "method", "setting", "ratio_median", "peak_bytes", "activation_share", "is_equal", "error")
_LONG = ("batch", "sequence", "peak_resident_bytes", "seconds_median", "copied_bytes", "stall_seconds", "pinned_bytes",
         "package")  # fmt: skip
"""Columns of questions in which methods stand side by side: of docs/benchmarks.md, and more."""
_SCALING = ("num_devices", "which", "layout", "num_micro_batches", "state_bytes", "peak_bytes", "kept_share",
            "swapped_share", "gain_over_full_recompute_percent", "tokens_per_second", "published_tokens_per_second",
            "outcome", "error")  # fmt: skip
_PARTS = ("which", "compute_seconds", "recompute_seconds", "collective_seconds", "all_to_all_seconds",
          "exposed_all_to_all_seconds", "bubble_seconds", "gradients_seconds", "step_seconds",
          "published_step_seconds")  # fmt: skip
_INTRO = """\
# Results

Made by `python -m benchmarks.report` from the files in `benchmarks/results`; no number is written by hand.
[How to run them, how to read them](../docs/benchmarks.md).

Every heading says where its numbers come from. *Measured*: a clock and counters. *Emulated*: measured, but something
was slowed down or stood in for. *Computed*: by the timeline or by formulas; nothing ran. *x plain* is the time of a
step over that of the plain step beside it: the median over rounds, with the smallest and the largest. *peak* is
everything on the device at the worst moment. *equal*: loss and gradients are plain's to the bit; NO: they are not.
"""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a record's rows as a table."""

    caption: str
    rows: Sequence[Mapping[str, Any]]
    keys: Sequence[str] = ()
    """The columns; none: all that there are."""
    is_folded: bool = False


def views(record: Record) -> list[View]:
    """How a question's rows are shown: as they are, unless something is worked out from them."""
    if record.question == "predicted":
        return [View("", summary(record.rows)), View("every plan", record.rows, is_folded=True)]
    if record.question == "emulated":
        return [View("", emulated.summary(record.rows)), View("every plan", record.rows, is_folded=True)]
    if record.question == "published_setting" and record.kind != "computed":
        return [View("", with_gains(record.rows))]
    if record.question == "details":
        pieces = dict.fromkeys(str(row["piece"]) for row in record.rows)
        return [View(name.replace("_", " "), _without_piece(record.rows, name)) for name in pieces]
    if record.question == "scaling":
        fitting = [row for row in record.rows if row.get("outcome") == "fits"]
        return [
            View("does it fit, and how fast", record.rows, keys=_SCALING),
            View("where the time of a step goes", fitting, keys=("num_devices", *_PARTS)),
        ]
    if record.question in _SIDE_BY_SIDE:
        return [View("", with_activation_share(record.rows), keys=(*_SHORT[:-2], *_LONG, *_SHORT[-2:]))]
    return [View("", record.rows)]


def _without_piece(rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "piece"} for row in rows if row["piece"] == name]


# -- RESULTS.md --------------------------------------------------------------------------------------------------------


def page(records: Sequence[Record], folder: Path) -> str:
    """The whole of RESULTS.md. A plot is shown if its file is beside the record in `folder`."""
    asked = [*QUESTIONS, *sorted({record.question for record in records} - set(QUESTIONS))]
    parts = [_INTRO]
    missing = []
    for question in asked:
        answers = [record for record in records if record.question == question]
        if not answers:
            missing.append(f"- {QUESTIONS[question]} `python -m benchmarks.{question}`")
            continue
        parts.append(f"## {answers[0].title}\n")
        parts += [_section(record, folder) for record in answers]
    if missing:
        parts.append("## No results yet\n\n" + "\n".join(missing) + "\n")
    not_built = [f"- {title}" for name, title in NOT_BUILT.items() if name not in asked]
    if not_built:
        parts.append("## Not built yet\n\n" + "\n".join(not_built) + "\n")
    return "\n".join(parts)


def _section(record: Record, folder: Path) -> str:
    kind = record.kind if record.kind == "measured" else record.kind.upper()
    parts = [f"### {record.hardware['name']} ({kind})\n", _origin(record)]
    for view in views(record):
        table = markdown_table(view.rows, _chosen(view.rows, view.keys)) + "\n"
        if view.is_folded:
            table = f"<details><summary>{view.caption}</summary>\n\n{table}\n</details>\n"
        elif view.caption:
            table = f"**{view.caption}**\n\n{table}"
        parts.append(table)
    plot = f"{record.hardware['folder']}/{record.question}.svg"
    if (folder / plot).exists():
        parts.append(f"![{record.title}]({folder.name}/{plot})\n")
    if record.notes:
        parts.append("\n".join(f"- {note}" for note in record.notes) + "\n")
    return "\n".join(parts)


def _origin(record: Record) -> str:
    settings = ", ".join(f"{label_of(key)} {value_text(key, value)}" for key, value in record.settings.items())
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines = [f"`{record.command}`", f"Settings: {settings}."]
    lines += [f"Machine: {', '.join(_machine(record.hardware))}."] if _machine(record.hardware) else []
    return "  \n".join([*lines, f"Versions: {versions}."]) + "\n"


def _machine(hardware: Mapping[str, Any]) -> list[str]:
    texts = [str(hardware["processor"])] if hardware.get("processor") else []
    for key, what in (
        ("num_cores", "cores"),
        ("host_memory_bytes", "of memory"),
        ("device_memory_bytes", "on the device"),
    ):
        if hardware.get(key):
            texts.append(f"{value_text(key, hardware[key])} {what}")
    return texts


# -- the table of the guide --------------------------------------------------------------------------------------------


def passage(records: Sequence[Record]) -> str:
    """What stands between the marks in docs/benchmarks.md: time against memory, one table for each hardware."""
    answers = [record for record in records if record.question == "time_against_memory"]
    if not answers:
        return (
            "No results yet: `make bench` makes them. What there is: [benchmarks/RESULTS.md](../benchmarks/RESULTS.md)."
        )
    parts = []
    for record in answers:
        parts += [_grid(with_activation_share(record.rows)), "", _source(record), ""]
    return "\n".join(parts).strip()


def _grid(rows: Sequence[Mapping[str, Any]]) -> str:
    """Methods down, models across; an error once, where it first came up."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    titles = list(dict.fromkeys(row["title"] for row in rows))
    by_place = {(row["title"], row["model"]): row for row in rows}
    errors: list[str] = []
    lines = [["x plain at activation", *models], ["---", *("---:" for _ in models)]]
    for title in titles:
        cells = [_cell(by_place.get((title, model)), errors) for model in models]
        lines.append([title.replace("|", "\\|"), *cells])
    grid = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    notes = [f"({number}) {text}" for number, text in enumerate(errors, start=1)]
    return "\n\n".join([grid, *(["  \n".join(notes)] if notes else [])])


def _cell(row: Mapping[str, Any] | None, errors: list[str]) -> str:
    if row is None:
        return ""
    if row.get("error"):
        text = " ".join(str(row["error"]).split())
        if text not in errors:
            errors.append(text)
        return f"({errors.index(text) + 1})"
    share = row["activation_share"]
    place = "" if share is None else f" at {share:.0%}"
    return f"{row['ratio_median']:.2f}{place}{'' if row['is_equal'] else ', NO'}"


def with_activation_share(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `activation_share`: what is left of the bytes that plain autograd saves in the same model.

    `saved_share` says which part a method takes away, by its peak against plain's.
    """
    return [
        {**row, "activation_share": None if row.get("saved_share") is None else 1 - row["saved_share"]} for row in rows
    ]


def _chosen(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Column]:
    found = {column.key: column for column in columns(rows)}
    return [found[key] for key in keys or found if key in found]


def _source(record: Record) -> str:
    kind = "" if record.kind == "measured" else f"{KINDS[record.kind]}. "
    versions = ", ".join(
        f"{name} {record.versions[name]}" for name in ("torch", "transformers") if name in record.versions
    )
    return (
        f"{kind}{record.hardware['name']}, {versions}; `{record.command}`. Each cell: time of a step over that of the "
        "plain one beside it, median over rounds, at what is left of the bytes that plain saves for backward. NO: loss "
        "and gradients are not plain's to the bit; everywhere else they are. Ranges, peaks, seconds, copies and all "
        "other questions: [benchmarks/RESULTS.md](../benchmarks/RESULTS.md)."
    )


def with_passage(guide: str, text: str) -> str:
    """docs/benchmarks.md with the passage replaced."""
    before, _, rest = guide.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert rest and mark, "docs/benchmarks.md has lost its marks"
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say what would change")
    args = parser.parse_args(argv)
    records = read_all()
    if not args.check:
        _draw(records)
    wanted = {
        PAGE: page(records, RESULTS),
        GUIDE: with_passage(GUIDE.read_text(encoding="utf-8"), passage(records)),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.name}: {'is not what the records say' if args.check else 'written'}")
        if not args.check:
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if args.check and stale else 0


def _draw(records: Sequence[Record]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: plots are left as they are (pip install -e '.[bench]')", file=sys.stderr)
        return
    from benchmarks.plots import draw

    for record in records:
        draw(record, RESULTS / record.hardware["folder"] / f"{record.question}.svg")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
