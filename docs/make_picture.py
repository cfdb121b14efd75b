"""Writes docs/memory.svg and two tables in docs/benchmarks.md from what was measured. No number is written by hand.

    python examples/demo.py --json > benchmarks/results/cpu-2-core/demo.json
    python -m benchmarks.host_swap
    python docs/make_picture.py

Cost: milliseconds. Not covered: the table of `make bench` (benchmarks/report.py); the picture shows one file.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu-2-core" / "demo.json"
INTERLEAVED = RESULT.with_name("host_swap.json")
PICTURE = ROOT / "docs" / "memory.svg"
PAGE = ROOT / "docs" / "benchmarks.md"
VARIANTS = {
    "plain": "plain, malloc",
    "plain_default": "plain",
    "keep": "lowtide, everything kept",
    "checkpoint": "transformers' layer checkpointing",
    "recompute": "lowtide, `recompute: all`",
    "swap": "lowtide, `swap: all`",
}

WIDTH, ROW, TOP, BAR = 770, 34, 62, 20
LABEL_X, MEMORY_X, MEMORY_WIDTH, TIME_X, TIME_WIDTH = 16, 110, 340, 545, 150
REST, ABOVE, TIME, INK, PAPER = "#b8c4ce", "#1f6f9f", "#c9822b", "#22303a", "#ffffff"
MIB = 2**20


def picture(report: Mapping[str, Any]) -> str:
    """The SVG: per run a bar of peak resident memory, in two parts, and one of the time of a step."""
    runs = report["runs"]
    most_bytes = max(run["peak_resident_bytes"] for run in runs.values())
    ratios = {name: _demo().time_ratio(runs, name) for name in runs}
    parts = [
        _text(MEMORY_X, 24, "Peak resident memory, MiB", weight="bold"),
        _box(MEMORY_X, 34, 10, 10, REST) + _text(MEMORY_X + 15, 43, "program, weights, optimizer", size=11),
        _box(MEMORY_X + 185, 34, 10, 10, ABOVE) + _text(MEMORY_X + 200, 43, "activations, gradients", size=11),
        _text(TIME_X, 24, "Time of a step, fastest plain = 1", weight="bold"),
    ]
    for index, (name, run) in enumerate(runs.items()):
        y = TOP + index * ROW
        scale = MEMORY_WIDTH / most_bytes
        rest, peak = run["rest_resident_bytes"], run["peak_resident_bytes"]
        parts += [
            _text(LABEL_X, y + 15, name),
            _box(MEMORY_X, y, rest * scale, BAR, REST),
            _box(MEMORY_X + rest * scale, y, (peak - rest) * scale, BAR, ABOVE),
            _text(MEMORY_X + peak * scale + 6, y + 15, f"{peak / MIB:.0f}"),
            _box(TIME_X, y, ratios[name] * TIME_WIDTH / max(ratios.values()), BAR, TIME),
            _text(TIME_X + ratios[name] * TIME_WIDTH / max(ratios.values()) + 6, y + 15, f"{ratios[name]:.2f}"),
        ]
    height = TOP + len(runs) * ROW + 30
    parts.append(_text(LABEL_X, height - 14, caption(report), size=11))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="sans-serif">\n<title>Peak resident memory and step time per run</title>\n'
    )
    return head + _box(0, 0, WIDTH, height, PAPER) + "\n" + "\n".join(parts) + "\n</svg>\n"


def caption(report: Mapping[str, Any]) -> str:
    """What was measured on what, in one line."""
    size, machine = report["size"], report["machine"]
    return (
        f"Llama, {report['num_parameters'] / 1e6:.1f} M parameters, {size['layers']} layers of {size['hidden']}, "
        f"{size['batch']} x {size['sequence']} tokens, fp32, AdamW. CPU, {machine['threads']} threads, "
        f"torch {machine['torch'].split('+')[0]}."
    )


def markdown_table(report: Mapping[str, Any]) -> str:
    """The demo's own table as Markdown, with its caption and its words."""
    header, *rows = _demo().rows(report)
    rule = ["---"] + ["---:"] * (len(header) - 2) + ["---"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
    return "\n".join([*lines, "", caption(report), "", *_demo().words(report)])


def interleaved_table(result: Mapping[str, Any]) -> str:
    """The variants of `benchmarks.host_swap` as Markdown: time with its spread, and resident memory above rest."""
    rows = {row["method"]: row for row in result["rows"]}
    assert rows.keys() == VARIANTS.keys(), "host_swap.json has other variants"
    base = min((rows[name] for name in ("plain", "plain_default")), key=lambda row: row["ratio_median"])
    above_bytes, time = base["above_rest_bytes"], base["ratio_median"]
    lines = [
        "| variant | x fastest plain | range | above rest, MiB | of fastest plain |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for method, name in VARIANTS.items():
        row = rows[method]
        spread = "-" if row is base else f"{row['ratio_min'] / time:.2f} - {row['ratio_max'] / time:.2f}"
        memory = f"{row['above_rest_bytes'] / MIB:.0f} | {row['above_rest_bytes'] / above_bytes:.0%}"
        lines.append(f"| {name} | {row['ratio_median'] / time:.2f} | {spread} | {memory} |")
    assert all(row["is_equal"] for row in rows.values()), "a gradient differs"
    rounds = result["settings"]["rounds"]
    return "\n".join(
        [*lines, "", f"Median and range of {rounds} rounds; memory is the peak of resident memory above rest."]
    )


def page(text: str, report: Mapping[str, Any], interleaved: Mapping[str, Any]) -> str:
    """docs/benchmarks.md with the measured parts replaced."""
    return _replaced(_replaced(text, "measured", markdown_table(report)), "host_swap", interleaved_table(interleaved))


def _replaced(text: str, mark: str, part: str) -> str:
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert rest and after, f"docs/benchmarks.md has lost its marks '{mark}'"
    return f"{before}{begin}\n{part}\n{end}{after}"


def _demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, *, size: int = 13, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{INK}">{text}</text>'


def main() -> None:
    report = json.loads(RESULT.read_text(encoding="utf-8"))
    PICTURE.write_text(picture(report), encoding="utf-8")
    interleaved = json.loads(INTERLEAVED.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), report, interleaved), encoding="utf-8")


if __name__ == "__main__":
    main()
