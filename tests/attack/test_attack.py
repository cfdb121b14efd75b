"""A few dozen draws of the attack, and the attack itself: that it would notice, and that it can be repeated."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.loss.attach import loss_of
from tests.attack import chosen, drive, moody, ordinary, words
from tests.attack.classes import CLASSES, NOT_YET
from tests.attack.draw import EARLY_BY_PLAN, STATES, Draw, Verdict, any_draw, drawn_from, judge, of_class
from tests.attack.habits import CORES, RARE_SIDES, SIDES, WORD_SIDES
from tests.attack.models import TRAITS
from tests.attack.now import TOKENS
from tests.attack.plans import KINDS, WITH_BUDGET, PlainRig
from tests.attack.shrink import shrunk
from tests.attack.traces import Trace
from tests.support import processes
from tests.support.grid import one_of
from tests.support.independent_count import IndependentCount

CHUNK = 10
RUN = "import runpy; runpy.run_module('tests.attack', run_name='__main__')"
ROOT = Path(__file__).parents[2]


def _parts(draw: Draw) -> set[tuple[str, object]]:
    """What a draw is made of: plan, engine, blocks, traits, habits, optimizer."""
    found: set[tuple[str, object]] = {("plan", draw.plan), ("engine", draw.engine.partition(":")[0])}
    found |= {("core", draw.core), ("way", draw.way), ("optimizer", draw.optimizer), ("samples", draw.num_samples)}
    found |= {("side", side) for side in draw.sides} | {("trait", trait) for trait in draw.model.traits}
    found |= {("state", draw.state), ("rows", bool(draw.rows))}
    if draw.model.words is not None:
        loss = draw.model.words
        found |= {("loss", loss.place), ("cap", bool(loss.cap)), ("smooth", bool(loss.smoothing))}
        found |= {("z", bool(loss.z_loss)), ("weights", loss.has_weights), ("items", loss.items)}
    return found | {("block", name) for layer in draw.model.layers for name, _ in layer}


@functools.cache
def _first_draws() -> list[tuple[Draw, set[tuple[str, object]]]]:
    """With what each is made of."""
    return [(draw, _parts(draw)) for draw in map(any_draw, range(400))]


def _seeds(num_draws: int, *, has_budget: bool) -> list[int]:
    """Draws that together have every part of the first 400, each the one with the most new parts; at most so many.

    Of those whose plans are made for a budget, or of the others: a budget costs ten times as much.
    """
    left = {draw.seed: parts for draw, parts in _first_draws() if (draw.plan in WITH_BUDGET) == has_budget}
    found: list[int] = []
    while len(found) < num_draws and any(left.values()):
        best = max(left, key=lambda seed: len(left[seed]))
        found.append(best)
        left = {seed: parts - left[best] for seed, parts in left.items()}
    return found


# Two that were once wrong (a planner that tripped over itself, gradients that came twice), and one where rows talk.
SEEDS = [*_seeds(400, has_budget=False), *_seeds(3, has_budget=True), 605, 996, 1037]


def test_every_part_of_the_attack_is_in_a_draw_of_this_suite() -> None:
    """`make attack` has thousands of draws; these are few, so no block and no habit may be missing."""
    drawn: set[tuple[str, object]] = set().union(*(_parts(any_draw(seed)) for seed in SEEDS))
    expected = {("block", name) for family in (ordinary, chosen, moody) for name in family.BLOCKS}
    expected |= {("core", name) for name in CORES} | {("side", name) for name in (*SIDES, *RARE_SIDES, *WORD_SIDES)}
    expected |= {("loss", place) for place in words.PLACES} | {("items", given) for given in ("", "int", "tensor")}
    expected |= {(part, True) for part in ("cap", "smooth", "z", "weights")}
    expected |= {("state", name) for name in (*STATES, EARLY_BY_PLAN)} | {("rows", True)}
    expected |= {("block", name) for name in ordinary.ROW_WISE}
    expected |= {("trait", name) for name in TRAITS} | {("plan", kind) for kind in KINDS}
    assert expected <= drawn, sorted(expected - drawn, key=str)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(SEEDS), CHUNK))
def test_draws_are_right_or_refused_by_name(first: int) -> None:
    wrong = []
    for seed in SEEDS[first : first + CHUNK]:
        draw = any_draw(seed)
        verdict = judge(draw)
        if verdict.is_wrong:
            again = f"python -m tests.attack --draw '{draw.to_text()}'"
            wrong.append(f"{verdict.kind}: {verdict.detail}\n  {draw.describe()}\n  {again}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("half", one_of(2, range(2)))
def test_each_class_that_was_found_once_is_right_now(half: int) -> None:
    wrong = []
    for name in sorted(set(CLASSES) - NOT_YET)[half::2]:
        verdict = judge(of_class(name, 0))
        if verdict.is_wrong:
            wrong.append(f"{name}: {verdict}\n  python -m tests.attack --class {name} --draws 10")
    assert not wrong, "\n".join(wrong)


def test_classes_are_drawn_unless_they_are_known_to_be_wrong() -> None:
    assert set(CLASSES) >= NOT_YET
    drawn = {drawn_from(seed).fault for seed in range(3000)}
    assert drawn == {"", *CLASSES} - NOT_YET


def test_a_draw_is_the_same_from_its_seed_and_from_its_text() -> None:
    for seed in range(200):
        draw = drawn_from(seed)
        assert draw == drawn_from(seed)
        assert Draw.from_text(draw.to_text()) == draw


def _first(**wanted: str) -> Draw:
    """The first draw like this that is ordinary otherwise."""
    draws = (any_draw(seed) for seed in range(10_000))
    return next(d for d in draws if all(getattr(d, key) == value for key, value in wanted.items()) and not d.sides)


def test_the_loss_of_a_vocabulary_is_sliced_in_the_draws() -> None:
    """With no threshold lowered; in the model and in the loop."""
    draws = [draw for draw in map(any_draw, range(400)) if draw.model.words is not None]
    inside = next(draw for draw in draws if draw.slices_loss and draw.plan == "recompute")
    run = inside.new_run(PlainRig(), Trace())
    with lowtide.apply(run.model, {"loss": "sliced"}):
        run.forward(0)
        assert loss_of(run.model) == "sliced"
    logits = torch.zeros(words.SAMPLES * TOKENS, words.WORDS, requires_grad=True)
    made = lowtide.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
    assert "_OfRows" in str(made.grad_fn.next_functions[0][0].next_functions)  # type: ignore[union-attr]


class _Careless(nn.Module):
    """Gives other values whenever it is under a plan: what the attack is there to see."""

    def __init__(self, r: object) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor, now: object) -> Tensor:
        self.num_calls += 1
        return torch.tanh(x) if "forward" not in vars(self) else torch.sigmoid(x)


def test_other_values_under_a_plan_are_noticed_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moody.BLOCKS, "hooked", _Careless)
    from tests.attack import models

    monkeypatch.setitem(models.BLOCKS, "hooked", _Careless)
    text = json.loads(_first(plan="recompute", core="plain", way="steady").to_text())
    text["plan"] = "leaves"
    text["model"]["layers"] = [[["gated", 1]], [["pointwise", 2], ["hooked", 3]], [["gated", 1]]]
    draw = Draw.from_text(json.dumps(text))
    verdict = judge(draw)
    assert verdict.kind == "silently wrong", verdict
    smaller, _ = shrunk(draw, verdict, judge)
    assert [name for layer in smaller.model.layers for name, _ in layer] == ["hooked"]


def test_the_independent_count_sees_what_is_alive() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with IndependentCount([weight]) as live:
        assert live.now_bytes == 4000
        first = weight * 2
        second = first.sin()
        assert live.now_bytes == 12_000
        del first, second
        assert live.now_bytes == 4000  # sin() saved `first`, and its graph died with `second`
        assert live.peak_bytes == 12_000
        live.restart()
        assert live.peak_bytes == 4000


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_has_progress_a_summary_and_json(tmp_path: Path) -> None:
    # Without budgets, which cost ten times as much.
    words = ["--draws", "3", "--start", "17", "--jobs", "1", "--json", str(tmp_path / "found")]
    status, out, err = processes.program(RUN, tmp_path, *words, seconds=200, PYTHONPATH=str(ROOT))
    found = json.loads((tmp_path / "found").read_text())
    assert found["first_seed"] == 17 and found["num_draws"] == 3 and found["next_seed"] == 20
    assert sum(found["verdicts"].values()) == 3
    assert status == (1 if found["wrong"] else 0), err
    assert "3 draws in" in out


@pytest.mark.slow
def test_an_interrupted_run_says_where_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    process = processes.start(RUN, tmp_path, "--draws", "100000", PYTHONPATH=str(ROOT))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers: list[str] = []
    end = time.monotonic() + 100  # a busy machine imports torch in its own time
    while not workers and process.is_alive() and time.monotonic() < end:
        time.sleep(0.05)
        workers = children.read_text().split()
    os.kill(process.pid, signal.SIGINT)
    status, out, err = processes.finish(process, tmp_path, 150)
    assert status == 130, err
    assert "go on with: python -m tests.attack --start" in out
    assert workers
    for worker in workers:
        assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize("kind", ["rows", "weights"])
def test_a_run_of_one_kind_has_no_other_draws_and_goes_on_after_the_last(kind: str) -> None:
    tally = drive.Tally(0, 3, only=kind)
    first = list(itertools.islice(tally.seeds(), 4))
    assert first == [seed for seed in range(first[-1] + 1) if drive.KINDS_OF_DRAWS[kind](drawn_from(seed))]
    for seed in first[:3]:
        tally.add(seed, Verdict("equal"))
    assert tally.next_seed == first[3]


_DIES_AT_ONE = """
import json, os, sys
for seed in json.loads(sys.argv[1]):
    print(json.dumps({"start": seed}), flush=True)
    if seed == 1:
        os.abort()
    print(json.dumps({"seed": seed, "kind": "equal", "detail": ""}), flush=True)
"""


def test_a_draw_that_kills_its_process_is_one_verdict() -> None:
    tally = drive.Tally(0, 3)
    drive.run(
        tally,
        num_jobs=1,
        say=lambda draw, verdict: None,
        command=lambda seeds: [sys.executable, "-c", _DIES_AT_ONE, json.dumps(seeds)],
    )
    assert [tally.found[seed][1].kind for seed in range(3)] == ["equal", "killed", "equal"]
    assert [draw.seed for draw, _ in tally.wrong] == [1]


def test_a_process_that_cannot_begin_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="before its first draw"):
        drive.run(
            drive.Tally(0, 3),
            num_jobs=1,
            say=lambda draw, verdict: None,
            command=lambda seeds: [sys.executable, "-c", "raise SystemExit(3)"],
        )
