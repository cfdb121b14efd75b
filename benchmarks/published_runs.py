"""Question o: does lowtide predict what others measured? Predicted beside published, row by row.

    python -m benchmarks.published_runs            # every row, a few minutes on two cores; --only ID ... for some
    python -m benchmarks.published_runs --json

What: published/runs.csv has training runs that others measured: on one device, or fully sharded over several. For each,
`published_forecast` says the seconds of a micro-batch and the bytes of its worst moment, from the model, the layout and
the files of devices and clusters; nothing is fitted to a row. Rows that were set aside before prices were changed stand
apart (published/README.md has the rule), and so do single devices and sharded runs.
A share is predicted over published. Peaks are compared where the allocator's own was published; one that is reserved is
an upper bound, and left out.

Not covered: fp8, tensor and pipeline parallel runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.published_forecast import GIB, Run, forecast, read_runs
from benchmarks.record import RESULTS, Record, read, versions
from benchmarks.rows import Row, command_of, run
from benchmarks.rows import parser as make_parser

TIMELINE = "timeline"
_VERSIONS = ("python", "lowtide", "torch", "transformers")


def row_of(published: Run) -> Row:
    """Predicted beside published. Seconds, GiB, and the share of both."""
    found = forecast(published)
    row: Row = {
        "group": group_of(published),
        "device": f"{published.gpus} x {published.device}",
        "mode": published.mode,
        "recompute": published.recompute,
        "published_seconds": published.seconds,
        "predicted_seconds": round(found.seconds, 4),
        "time_share": round(found.seconds / published.seconds, 3),
        "exposed_seconds": round(found.exposed_seconds, 4),
        "recompute_seconds": round(found.recompute_seconds, 4),
        "optimizer_seconds": round(found.optimizer_seconds, 4),
    }
    if published.is_allocated and published.peak_bytes is not None:
        row |= {
            "predicted_gib": round(found.peak_bytes / GIB, 2),
            "published_gib": round(published.peak_bytes / GIB, 2),
            "peak_share": round(found.peak_bytes / published.peak_bytes, 3),
        }
    return row


def group_of(published: Run) -> str:
    """Tuned or set aside, and on how many devices."""
    kind = "one device" if published.kind == "single" else "fully sharded"
    return f"{kind}, {'set aside' if published.is_aside else 'tuned'}"


def groups_of(rows: Sequence[Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """For each group how far off the shares are, as a part of one: median and worst, of time and of peaks."""
    found: dict[str, dict[str, float]] = {}
    for name in sorted({str(row["group"]) for row in rows if "group" in row}):
        mine = [row for row in rows if row.get("group") == name]
        entry: dict[str, float] = {"num_rows": len(mine)}
        for what in ("time", "peak"):
            off = [abs(float(str(row[f"{what}_share"])) - 1) for row in mine if f"{what}_share" in row]
            if off:
                entry |= {f"median_{what}": statistics.median(off), f"worst_{what}": max(off)}
        found[name] = entry
    return found


def group_lines(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The verdicts, for people."""
    lines = []
    for name, entry in groups_of(rows).items():
        text = f"{name}, {entry['num_rows']:.0f} rows: time off by {100 * entry['median_time']:.1f} % (median), "
        text += f"{100 * entry['worst_time']:.1f} % (worst)"
        if "median_peak" in entry:
            text += f"; peak by {100 * entry['median_peak']:.1f} % (median), {100 * entry['worst_peak']:.1f} % (worst)"
        lines.append(text)
    return lines


def main(argv: Sequence[str]) -> int:
    args = make_parser("published_runs", __doc__, device=TIMELINE, only="ID").parse_args(argv)
    runs = {published.id: published for published in read_runs()}
    record = Record(
        question="published_runs",
        title="Does lowtide predict what others measured?",
        kind="computed",
        command=command_of("published_runs", argv),
        settings={"rows": "benchmarks/published/runs.csv"},
        rows=[],
        notes=[
            "Nothing ran here. Times and peaks are predicted from models, layouts and the files of devices and "
            "clusters; no constant is fitted to a row.",
            "Rows in groups set aside were chosen before any price was changed (benchmarks/published/README.md).",
            "A share is predicted over published. Peaks are compared where the allocator's own was published.",
        ],
        hardware={"folder": TIMELINE, "name": "published runs, by roofline"},
        versions={key: value for key, value in versions().items() if key in _VERSIONS},
    )
    status = run(record, [{"id": name} for name in runs], lambda piece: row_of(runs[str(piece["id"])]), args)
    written = (args.out if isinstance(args.out, Path) else RESULTS) / TIMELINE / "published_runs.json"
    if status != 2 and not args.json and written.exists():
        print("\n" + "\n".join(group_lines(read(written).rows)))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
