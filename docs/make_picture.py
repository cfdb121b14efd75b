"""Writes docs/memory.svg and the table in README.md from what `make demo` measured. No number is written by hand.

    python examples/demo.py --steps 4 --json > benchmarks/results/cpu-2-core/demo.json
    python docs/make_picture.py

Cost: milliseconds. Not covered: other results; the picture shows one file.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu-2-core" / "demo.json"
PICTURE = ROOT / "docs" / "memory.svg"
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

WIDTH, ROW, TOP, BAR = 770, 34, 62, 20
LABEL_X, MEMORY_X, MEMORY_WIDTH, TIME_X, TIME_WIDTH = 16, 110, 340, 545, 150
REST, ABOVE, TIME, INK, PAPER = "#b8c4ce", "#1f6f9f", "#c9822b", "#22303a", "#ffffff"
MIB = 2**20


def picture(report: Mapping[str, Any]) -> str:
    """The SVG: per run a bar of peak resident memory, in two parts, and one of the time of a step."""
    runs = report["runs"]
    most_bytes = max(run["peak_resident_bytes"] for run in runs.values())
    plain_seconds = statistics.median(runs["plain"]["step_seconds"])
    ratios = {name: statistics.median(run["step_seconds"]) / plain_seconds for name, run in runs.items()}
    parts = [
        _text(MEMORY_X, 24, "Peak resident memory, MiB", weight="bold"),
        _box(MEMORY_X, 34, 10, 10, REST) + _text(MEMORY_X + 15, 43, "program, weights, optimizer", size=11),
        _box(MEMORY_X + 185, 34, 10, 10, ABOVE) + _text(MEMORY_X + 200, 43, "activations, gradients", size=11),
        _text(TIME_X, 24, "Time of a step, plain = 1", weight="bold"),
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
    """The demo's own table as Markdown, with its caption."""
    header, *rows = _demo().rows(report)
    rule = ["---"] + ["---:"] * (len(header) - 2) + ["---"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
    return "\n".join([*lines, "", caption(report)])


def readme(text: str, report: Mapping[str, Any]) -> str:
    """README.md with the measured part replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, "README.md has lost its marks"
    return f"{before}{BEGIN}\n{markdown_table(report)}\n{END}{after}"


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
    README.write_text(readme(README.read_text(encoding="utf-8"), report), encoding="utf-8")


if __name__ == "__main__":
    main()
