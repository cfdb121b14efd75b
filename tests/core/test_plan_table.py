"""The text of a solved plan, to the letter; other budgets, and the curve."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.memory import MemoryConfig, load_memory
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Fate, Tier
from lowtide.core.plan import Plan, notebook_html
from lowtide.core.text_table import first_few, percent
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.budget_sweep import budget_sweep, sweep_lines
from lowtide.report.played_step import Played, play
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, decoder_profile

GOLDEN = Path(__file__).parent / "golden"
LINK = Link(out_bytes_per_second=20e9, in_bytes_per_second=20e9)
PROFILE = decoder_profile(8)
TIGHT = load_memory({"budget": "900MiB", "keep": ["layers.7.mlp"]})
WIDE = load_memory({"budget": "4GiB"})


def solved(memory: MemoryConfig) -> Plan:
    return plan_profile(PROFILE, memory, link=LINK)


@pytest.fixture(scope="module")
def tight() -> Plan:
    return solved(TIGHT)


def test_golden_table() -> None:
    """Of a plan that was solved once: what the solver finds may get better, how it is written may not change."""
    plan = Plan.from_json((GOLDEN / "solved_plan.json").read_text(encoding="utf-8"))
    assert f"{plan}\n" == (GOLDEN / "solved_plan.txt").read_text(encoding="utf-8")


def test_a_solved_plan_survives_json(tight: Plan) -> None:
    assert Plan.from_json(tight.to_json()) == tight
    assert str(Plan.from_json(tight.to_json())) == str(tight)


def test_a_plan_that_fits_says_that_it_does_nothing() -> None:
    plan = solved(WIDE)
    assert plan.does_nothing
    lines = str(plan).splitlines()
    assert lines[0].endswith(": peak 2.6 GiB of a budget of 4.0 GiB; everything kept 2.6 GiB, floor 570.8 MiB")
    assert lines[4] == "This plan does nothing: everything fits."
    assert "retained_input" not in str(plan)


def test_every_byte_is_in_the_table(tight: Plan) -> None:
    """Kept + swapped + recomputed of the last line are what plain autograd saves; retained inputs stand beside it."""
    total = str(tight).splitlines()[-1].split()
    sizes = [float(number) * {"MiB": 1, "GiB": 1024}[unit] for number, unit in zip(total[1:9:2], total[2:9:2])]
    saved = sum(site.nbytes for site in tight.sites if site.retained_input is None) / MIB
    held = sum(
        site.nbytes for site in tight.sites if site.retained_input is not None and site.fate is not Fate.RECOMPUTE
    )
    assert sum(sizes[:3]) == pytest.approx(saved, abs=0.2 * 1024)
    assert sizes[3] * MIB == pytest.approx(held, abs=0.1 * MIB)


def test_a_solved_plan_without_prediction_can_be_printed(tight: Plan) -> None:
    bare = dataclasses.replace(tight, predicted=None, account=())
    assert str(bare).startswith(f"plan {tight.digest()}, 8 layers, 49 sites, ")


# -- other budgets -------------------------------------------------------------------------------------------------


def test_the_ladder_goes_from_everything_kept_to_the_floor(tight: Plan) -> None:
    sweep = budget_sweep(tight, PROFILE, TIGHT, link=LINK)
    predicted = tight.predicted
    assert predicted is not None
    budgets = list(sweep)
    assert budgets == sorted(budgets, reverse=True)
    assert (budgets[0], budgets[-1]) == (predicted.plain_peak_bytes, predicted.floor_bytes)
    assert tight.budget_bytes is not None
    assert sweep[tight.budget_bytes] == predicted
    assert all(found.peak_bytes <= budget for budget, found in sweep.items())
    lines = sweep_lines(sweep, tight.budget_bytes)
    assert lines[0].split() == ["budget", "of", "plain", "peak", "step", "over", "plain", "stalls", "recompute", "gap"]
    assert [line.endswith("<- this plan") for line in lines].count(True) == 1


def test_progress_of_the_ladder(tight: Plan) -> None:
    said: list[str] = []
    budget_sweep(tight, PROFILE, TIGHT, link=LINK, progress=said.append)
    assert said == [f"other budgets, {number} of 6" for number in range(1, 7)]


# -- the curve -----------------------------------------------------------------------------------------------------


def test_the_curve_is_that_of_the_prediction(tight: Plan) -> None:
    curve = play(tight, PROFILE, TIGHT, link=LINK)
    assert tight.predicted is not None
    assert max(curve.planned_bytes) == tight.predicted.peak_bytes
    assert max(curve.plain_bytes) == tight.predicted.plain_peak_bytes
    assert sum(curve.seconds) == pytest.approx(tight.predicted.plain_seconds)


def test_a_curve_in_fewer_points_has_the_most_of_each() -> None:
    ground = 100 << 30
    curve = Played(
        seconds=(1.0, 0.0, 1.0),
        num_forward_ticks=2,
        plain_bytes=(ground, ground + (8 << 30), ground),
        planned_bytes=(ground, ground + (4 << 30), ground),
        budget_bytes=None,
        starts=(),
        bytes_by_owner=(),
        step_seconds=2.0,
        events=(),
    )
    assert curve.thinned(2) == {
        "start_seconds": [0.0, 1.0],
        "plain_bytes": [ground, ground + (8 << 30)],
        "planned_bytes": [ground, ground + (4 << 30)],
    }


# -- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "text"), [(0.0421, "4.2 %"), (-1e-9, "0.0 %"), (1.0, "100.0 %")])
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_first_few() -> None:
    assert first_few(["a", "b", "c"], 3) == "a, b, c"
    assert first_few(["a", "b", "c", "d", "e"], 3) == "a, b, c and 2 more"


# -- the optimizer's state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"moved_bytes": 0, "reason": "everything fits"}, ["optimizer state: stays on the device, everything fits"]),
        ({"moved_bytes": None, "reason": "memory.optimizer asks for it"},
         ["optimizer state: on the host between steps, memory.optimizer asks for it"]),
        ({"free_from_tokens": None},
         ["optimizer state: 3.0 GiB on the host between steps, 1.0 GiB stays; the budget asks for it",
          "  2.0 GiB come back while backward runs, leave in the next forward; "
          "1.0 GiB come and go while the optimizer steps, in buckets of 128.0 MiB",
          "  exposed 20.0 ms a step, slows compute by 1.5 ms"]),
        ({"resident_bytes": 0, "beside_bytes": 3 << 30, "exposed_seconds": 0.0, "tier": Tier.DISK},
         ["optimizer state: 3.0 GiB on the disk between steps; the budget asks for it",
          "  3.0 GiB come back while backward runs, leave in the next forward, in buckets of 128.0 MiB",
          "  exposed 0 s a step, slows compute by 1.5 ms; free from 21,304 tokens a step"]),
    ],
)  # fmt: skip
def test_lines_of_a_placement(changes: dict[str, Any], lines: list[str], tight: Plan) -> None:
    moved = OptimizerPlacement(
        moved_bytes=3 << 30, resident_bytes=1 << 30, beside_bytes=2 << 30, bucket_bytes=128 << 20, overlap="backward",
        exposed_seconds=0.02, slowed_seconds=0.0015, free_from_tokens=21304, reason="the budget asks for it",
    )  # fmt: skip
    placement = dataclasses.replace(moved, **changes)
    assert placement.lines() == lines
    text = str(dataclasses.replace(tight, optimizer=placement)).splitlines()
    start = text.index(lines[0])
    assert text[start : start + len(lines)] == lines


def test_the_time_that_the_state_costs_is_named(tight: Plan) -> None:
    assert tight.predicted is not None
    slower = dataclasses.replace(
        tight.predicted, step_seconds=tight.predicted.step_seconds + 0.025, optimizer_seconds=0.025
    )
    assert slower.pass_seconds == pytest.approx(tight.predicted.step_seconds)
    line = str(dataclasses.replace(tight, predicted=slower)).splitlines()[1]
    assert ", optimizer state 25.0 ms" in line
    assert "optimizer state" not in str(tight).splitlines()[1]


def test_memory_that_is_taken_again_is_named(tight: Plan) -> None:
    assert tight.predicted is not None
    more = dataclasses.replace(
        tight.predicted, step_seconds=tight.predicted.step_seconds + 0.03, page_fault_seconds=0.03
    )
    line, before = (str(plan).splitlines()[1] for plan in (dataclasses.replace(tight, predicted=more), tight))
    assert ", freed memory taken again 30.0 ms" in line and "taken again" not in before
    assert ("copies slow it" in line) == ("copies slow it" in before)


def test_a_notebook_shows_the_table(tight: Plan) -> None:
    """In a box of its own that scrolls; what a name has of HTML is text."""
    shown = tight._repr_html_()
    assert shown.startswith('<b>lowtide.Plan</b><pre style="overflow-x: auto;') and shown.endswith("</pre>")
    assert html.escape(str(tight)) in shown
    assert "&lt;x&gt;" in notebook_html("<x>", None) and "no plan yet" in notebook_html("<x>", None)
