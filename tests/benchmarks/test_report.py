"""RESULTS.md, the table of docs/benchmarks.md and the plots are what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_run, report
from benchmarks.record import Record, read_all, write

CPU = {"folder": "cpu-2-core", "name": "CPU, 2 cores", "processor": "A processor", "num_cores": 2}
TIME = Record(
    question="time_against_memory",
    title="What does a step cost at less activation memory?",
    kind="measured",
    command="python -m benchmarks.time_against_memory",
    settings={"rounds": 5, "dtype": "float32", "min_bytes": 65536},
    rows=[
        {"model": "llama", "method": "plain", "setting": None, "title": "plain", "ratio_median": 1.0, "ratio_min": 1.0,
         "ratio_max": 1.0, "seconds_median": 0.5, "peak_bytes": 400 * 2**20, "saved_share": 0.0, "is_equal": True,
         "error": None, "package": None},
        {"model": "llama", "method": "lowtide", "setting": 0.3, "title": "lowtide, 30 %", "ratio_median": 1.0625,
         "ratio_min": 1.0, "ratio_max": 1.25, "seconds_median": 0.53, "peak_bytes": 200 * 2**20, "saved_share": 0.7,
         "is_equal": True, "error": None, "package": "lowtide 0.1.0"},
        {"model": "llama", "method": "other", "setting": None, "title": "other | one", "ratio_median": 1.5,
         "ratio_min": 1.4, "ratio_max": 1.6, "seconds_median": 0.75, "peak_bytes": 300 * 2**20, "saved_share": 0.4,
         "is_equal": False, "error": None, "package": "other 2"},
        {"model": "llama", "method": "third", "setting": None, "title": "third", "error": "RuntimeError: cannot\nrun",
         "package": None},
    ],
    notes=["A note."],
    hardware=CPU,
    versions={"python": "3.11.7", "torch": "2.13.0"},
)  # fmt: skip
NEW = Record(
    question="brand_new", title="Something new?", kind="emulated", command="python -m benchmarks.brand_new",
    settings={}, rows=[{"colour": "red", "num_things": 12345, "weight_bytes": 3 * 2**30, "peak_percent": 1.5}],
    hardware=CPU, versions={"torch": "2.13.0"},
)  # fmt: skip

PASSAGE = """\
| x plain at activation | llama |
| --- | ---: |
| plain | 1.00 at 100% |
| lowtide, 30 % | 1.06 at 30% |
| other \\| one | 1.50 at 60%, NO |
| third | (1) |

(1) RuntimeError: cannot run

CPU, 2 cores, torch 2.13.0; `python -m benchmarks.time_against_memory`. Each cell: time of a step over that of the \
plain one beside it, median over rounds, at what is left of the bytes that plain saves for backward. NO: loss and \
gradients are not plain's to the bit; everywhere else they are. Ranges, peaks, seconds, copies and all other \
questions: [benchmarks/RESULTS.md](../benchmarks/RESULTS.md)."""

SECTION = """\
## What does a step cost at less activation memory?

### CPU, 2 cores (measured)

`python -m benchmarks.time_against_memory`  
Settings: rounds 5, dtype float32, min 0.062 MiB.  
Machine: A processor, 2 cores.  
Versions: python 3.11.7, torch 2.13.0.

| model | method | x plain | peak | activation | seconds a step | package | equal | error |
| --- | --- | ---: | ---: | ---: | ---: | --- | --- | --- |
| llama | plain | 1.000 (1.000 - 1.000) | 400.0 MiB | 100.0 % | 500.0 ms | - | yes | - |
| llama | lowtide, 30 % | 1.062 (1.000 - 1.250) | 200.0 MiB | 30.0 % | 530.0 ms | lowtide 0.1.0 | yes | - |
| llama | other \\| one | 1.500 (1.400 - 1.600) | 300.0 MiB | 60.0 % | 750.0 ms | other 2 | NO | - |
| llama | third | - | - | - | - | - | - | RuntimeError: cannot run |

- A note.

## Something new?

### CPU, 2 cores (EMULATED)

`python -m benchmarks.brand_new`  
Settings: .  
Machine: A processor, 2 cores.  
Versions: torch 2.13.0.

| colour | things | weight | peak |
| --- | ---: | ---: | ---: |
| red | 12,345 | 3.0 GiB | 1.50 % |

## No results yet
"""  # noqa: W291


def test_the_page_says_what_the_records_say(tmp_path: Path) -> None:
    page = report.page([NEW, TIME], tmp_path)
    assert SECTION in page
    assert "- How long does planning take as models grow? `python -m benchmarks.planning_time`\n" in page
    assert "## Not built yet\n\n- How large are the bubbles of pipeline schedules, predicted and real?\n" in page


def test_the_guide_has_the_table_of_time_against_memory() -> None:
    assert report.passage([NEW, TIME]) == PASSAGE
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.with_passage(text, PASSAGE) == f"before\n{report.BEGIN}\n{PASSAGE}\n{report.END}\nafter\n"


def test_without_a_record_there_is_no_table() -> None:
    assert "|" not in report.passage([NEW])
    assert "`make bench`" in report.passage([])


def test_committed_pages_are_made_from_committed_records() -> None:
    records = read_all()
    assert records
    assert report.PAGE.read_text(encoding="utf-8") == report.page(records, report.RESULTS)
    guide = report.GUIDE.read_text(encoding="utf-8")
    assert guide == report.with_passage(guide, report.passage(records))


def test_the_questions_of_the_makefile_have_a_command_and_a_place() -> None:
    makefile = (report.PAGE.parent.parent / "Makefile").read_text(encoding="utf-8")
    (line,) = [line for line in makefile.splitlines() if line.startswith("QUESTIONS := ")]
    assert line.removeprefix("QUESTIONS := ").split() == list(report.QUESTIONS)
    assert set(gpu_run.PIECES) - {"tests", "gpu"} < set(report.QUESTIONS)


def test_views_of_details_and_of_a_real_published_run() -> None:
    import dataclasses

    rows = [{"piece": "hooks", "num_tensors": 3}, {"piece": "copy_size", "size_bytes": 4096}]
    first, second = report.views(dataclasses.replace(TIME, question="details", rows=rows))
    assert (first.caption, first.rows) == ("hooks", [{"num_tensors": 3}])
    assert (second.caption, second.rows) == ("copy size", [{"size_bytes": 4096}])
    rows = [
        {"method": "full recompute", "seconds_median": 1.2, "loss_and_gradients": "ab"},
        {"method": "lowtide", "seconds_median": 1.0, "loss_and_gradients": "ab"},
        {"method": "bad", "seconds_median": 0.6, "loss_and_gradients": "cd"},
        {"method": "plain, no cap", "error": "out of memory"},
    ]
    (view,) = report.views(dataclasses.replace(TIME, question="published_setting", kind="emulated", rows=rows))
    assert [row.get("gain_percent") for row in view.rows] == pytest.approx([0, 20, 100, None])
    assert [row.get("is_equal") for row in view.rows] == [True, True, False, None]


def test_plots_are_the_same_bytes_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install -e '.[bench]'")
    from benchmarks.plots import draw

    assert draw(TIME, tmp_path / "first.svg")
    assert draw(TIME, tmp_path / "again.svg")
    first = (tmp_path / "first.svg").read_bytes()
    assert first == (tmp_path / "again.svg").read_bytes()
    assert b"lowtide" in first and b"date" not in first
    assert not draw(NEW, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_committed_plots_are_drawn_from_committed_records(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install -e '.[bench]'")
    from benchmarks.plots import draw

    constraints = (report.PAGE.parent.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if f"matplotlib=={matplotlib.__version__}" not in constraints:
        pytest.skip("plots are the same bytes only with the matplotlib of constraints.txt")
    for record in read_all():
        committed = report.RESULTS / record.hardware["folder"] / f"{record.question}.svg"
        if draw(record, tmp_path / "plot.svg"):
            assert committed.read_bytes() == (tmp_path / "plot.svg").read_bytes(), committed
        else:
            assert not committed.exists()


def test_a_plot_is_shown_where_there_is_one(tmp_path: Path) -> None:
    write(NEW, tmp_path)
    (tmp_path / "cpu-2-core" / "brand_new.svg").write_text("<svg/>")
    name = tmp_path.name
    assert f"![Something new?]({name}/cpu-2-core/brand_new.svg)\n" in report.page([NEW], tmp_path)
