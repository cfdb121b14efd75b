"""Published runs: the facts are whole, the rows set aside are those of the rule, and the verdicts hold."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import pytest

from benchmarks.published_forecast import FOLDER, Run, device_of, read_runs
from benchmarks.published_runs import group_lines, groups_of, row_of
from benchmarks.record import RESULTS, read
from lowtide.timeline.hardware import known_names

RUNS = {run.id: run for run in read_runs()}
ROWS = {row["id"]: row for row in read(RESULTS / "timeline" / "published_runs.json").rows}


def test_every_row_says_where_it_is_from_and_on_what_it_ran() -> None:
    assert len(RUNS) == 39
    for run in RUNS.values():
        assert run.source and run.note and run.seconds > 0
        assert run.kind in {"single", "fsdp"} and run.mode in {"eager", "compiled"}
        assert run.recompute in {"none", "full", "second", "op"}
        assert device_of(run).memory_bytes > 0
        assert (run.kind == "single") == (run.gpus == run.shards == 1) and run.gpus % run.shards == 0
        if run.kind == "fsdp":
            assert run.device.removesuffix("_500w") in known_names("clusters")
    assert (FOLDER / "parts.csv").read_text(encoding="utf-8").count("\n") > 20


def test_the_rows_set_aside_are_those_of_the_rule() -> None:
    def order(run: Run) -> str:
        return hashlib.sha256(f"published runs: {run.id}".encode()).hexdigest()

    groups = defaultdict(list)
    for run in RUNS.values():
        groups["drawn later" if run.id.startswith("mpt-") else f"{run.kind} {run.mode}"].append(run)
    chosen = set(groups.pop("drawn later"))
    for group in groups.values():
        chosen |= set(sorted(group, key=order)[: len(group) // 3])
    assert {run.id for run in chosen} == {run.id for run in RUNS.values() if run.is_aside}


def test_the_verdicts() -> None:
    """What was asked for: times within 10 % in the median and 25 % at worst, peaks within 5 %. Peaks fall short: of
    rows that do not say what else the program holds."""
    assert ROWS.keys() == RUNS.keys() and not any(row.get("error") for row in ROWS.values())
    found = groups_of(list(ROWS.values()))
    assert {name: entry["num_rows"] for name, entry in found.items()} == {
        "fully sharded, set aside": 15, "fully sharded, tuned": 17, "one device, set aside": 2, "one device, tuned": 5,
    }  # fmt: skip
    for entry in found.values():
        assert entry["median_time"] <= 0.05 and entry["worst_time"] <= 0.21
    assert found["fully sharded, set aside"]["worst_time"] <= 0.14
    assert found["one device, tuned"]["median_peak"] <= 0.04
    assert found["one device, set aside"]["median_peak"] <= 0.05
    far = {name for name, row in ROWS.items() if abs(row.get("peak_share", 1.0) - 1) > 0.07}
    assert far == {"tn6", "tn7", "kf2"}


@pytest.mark.parametrize("name", ["mpt-1b-2048-64", "tn5"])
def test_the_record_is_what_lowtide_says_today(name: str) -> None:
    assert {"id": name, **row_of(RUNS[name])} == ROWS[name]


def test_groups_say_how_far_off() -> None:
    rows = [{"group": "a", "time_share": share, "peak_share": 1.0} for share in (0.8, 1.1, 1.05)]
    assert group_lines([*rows, {"group": "b", "time_share": 1.0}]) == [
        "a, 3 rows: time off by 10.0 % (median), 20.0 % (worst); peak by 0.0 % (median), 0.0 % (worst)",
        "b, 1 rows: time off by 0.0 % (median), 0.0 % (worst)",
    ]
