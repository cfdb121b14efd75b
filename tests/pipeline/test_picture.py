"""Pictures are the golden ones, show every action once, and stay within a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowtide.pipeline.clock import Durations, picture, play
from lowtide.pipeline.generators import make_schedule

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
SMALL = [("gpipe", 2), ("1f1b", 2), ("interleaved", 2), ("interleaved_overlap", 2), ("zb_v", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("name", "num_ranks"), [*SMALL, ("dualpipev", 4)])
def test_pictures_are_the_golden_ones(name: str, num_ranks: int) -> None:
    schedule = make_schedule(name, num_ranks=num_ranks, num_micro_batches=2 * num_ranks)
    golden = GOLDEN / f"{name}-{num_ranks}-{2 * num_ranks}.txt"
    assert picture(schedule) == golden.read_text(encoding="utf-8")


def test_the_code_of_the_documentation_prints_the_picture_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, *_ = re.findall(r"```(?:python)?\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "docs/pipelines.md", "exec"), {})
    assert capsys.readouterr().out.rstrip("\n") == shown.rstrip("\n")
    assert shown == (GOLDEN / "dualpipev-2-4.txt").read_text(encoding="utf-8")


def test_every_action_is_shown_once_and_lines_keep_to_the_page() -> None:
    schedule = make_schedule("dualpipev", num_ranks=4, num_micro_batches=12)
    text = picture(schedule, columns=80)
    assert max(map(len, text.splitlines())) <= 80
    shown = sorted(re.findall(r"\d+[FBIW]\d+", text))
    assert shown == sorted(str(part) for row in schedule.actions for every in row for part in every.parts)


def test_names_fit_whatever_the_durations() -> None:
    schedule = make_schedule("dualpipev", num_ranks=2, num_micro_batches=4)
    durations = Durations(
        forward_seconds=0.3,
        backward_seconds=0.7,
        backward_input_seconds=0.3,
        backward_weight_seconds=0.4,
        pair_seconds=0.8,
    )
    text = picture(schedule, durations.seconds_of, columns=1000)
    for line, row in zip(text.splitlines(), play(schedule, durations.seconds_of).rows):
        shown = re.findall(r"[\dFBIW&]+", line.removeprefix("rank").split(maxsplit=1)[1])
        assert shown == ["&".join(map(str, timed.action.parts)) for timed in row]
