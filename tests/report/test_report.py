"""Reports of plans and of runs: the figures that they show, and the forms that they take."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli.main import main
from lowtide.config.memory import load_memory
from lowtide.core.profile import Profile
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling.fake.trace import trace as trace_fake
from lowtide.report.budget_sweep import budget_sweep
from lowtide.report.played_step import play
from lowtide.report.report import Report, document, report_of_plan
from lowtide.report.write import _sweep_caption, page, trace
from lowtide.timeline.hardware import load_hardware
from lowtide.timeline.step import Link
from lowtide.units import format_bytes
from tests.support.virtual_engine import virtual

LINK = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9)


def _model(num_layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(num_layers)))


class Mean(nn.Module):
    """A loss inside of the model, so that a plan covers the whole step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@functools.cache
def _profile() -> Profile:
    return trace_fake(_model(), (torch.zeros(512, 64),), hardware=load_hardware("cpu"), loss=torch.sum)


@functools.cache
def _report(share: float = 0.5) -> Report:
    profile = _profile()
    config = load_memory({"budget": "1GiB", "min_bytes": 0})
    whole = plan_profile(profile, config, link=LINK).predicted
    assert whole is not None
    budget = int(whole.floor_bytes + share * (whole.plain_peak_bytes - whole.floor_bytes))
    config = load_memory({"budget": budget, "min_bytes": 0})
    plan = plan_profile(profile, config, link=LINK)
    sweep = budget_sweep(plan, profile, config, link=LINK)
    return report_of_plan(plan, profile, config, link=LINK, sweep=sweep)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_bytes_of_all_owners_are_the_curve(share: float) -> None:
    report = _report(share)
    played, plan = report.played, report.plan
    assert played is not None and plan is not None and plan.predicted is not None
    assert tuple(map(sum, zip(*played.bytes_by_owner, strict=True))) == played.planned_bytes
    assert max(played.planned_bytes) == plan.predicted.peak_bytes
    assert min(min(part) for part in played.bytes_by_owner) >= 0
    assert list(played.starts) == sorted(played.starts)
    ends = {event.name: event.end for event in played.events if event.lane == "compute"}
    assert played.starts[1] == ends["forward 0"]
    assert played.starts[-1] <= played.step_seconds
    assert played.step_seconds == pytest.approx(plan.predicted.pass_seconds, rel=1e-9)


def test_what_a_plan_swaps_is_in_the_lanes() -> None:
    profile = _profile()
    config = load_memory({"budget": "1GiB", "min_bytes": 0, "swap": ["0", "1"]})
    plan = plan_profile(profile, config, link=LINK)
    played = play(plan, profile, config, link=LINK)
    swapped = {site.name for site in plan.sites if site.fate.value == "swap"}
    assert swapped
    for lane in ("out", "in"):
        assert {event.name for event in played.events if event.lane == lane} == swapped
    names = [event["name"] for event in trace(played, "t")["traceEvents"] if event["ph"] == "X"]
    assert swapped <= set(names)


def test_the_page_stands_alone() -> None:
    report = _report()
    text = page(report)
    assert text == page(report)  # no dates, no random ids
    assert not re.search(r"(?:src|href|srcset)=\"(?!data:)", text)
    assert "<script" not in text
    assert text.count("<figure>") == 3
    for title in (
        "Memory over one step",
        "What runs when",
        "What other budgets would cost",
    ):
        assert f"<h2>{title}</h2>" in text
    assert len(text.encode()) < 2_000_000


def test_the_document_has_the_same_figures() -> None:
    report = _report()
    assert report.plan is not None and report.plan.predicted is not None
    content = json.loads(json.dumps(document(report)))
    assert max(content["step"]["planned_bytes"]) == report.plan.predicted.peak_bytes
    assert content["figures"][0]["what"] == "peak, predicted"
    assert [row["is_requested"] for row in content["budgets"]].count(True) == 1
    tiles = {tile["what"]: tile for tile in content["figures"]}
    predicted = report.plan.predicted
    saved_bytes = predicted.plain_peak_bytes - predicted.peak_bytes
    assert tiles["saved by the plan"]["value"] == format_bytes(saved_bytes)
    assert (
        tiles["saved by the plan"]["beside"]
        == f"{100 * saved_bytes / predicted.plain_peak_bytes:.0f} % of everything kept"
    )


def test_a_run_within_a_budget(tmp_path: Path) -> None:
    model = _model()
    tide = lowtide.optimize(model, budget="1GiB", memory={"min_bytes": 0, "swap": ["0"]}, engine=virtual(1))
    with pytest.raises(
        lowtide.ConfigError, match=r"^lowtide\.write_report: no step has run under this handle yet; run one"
    ):
        lowtide.write_report(tide, tmp_path / "run.json")
    for _ in range(3):
        model(torch.ones(32, 64)).sum().backward()
    content = json.loads(lowtide.write_report(model, tmp_path / "run.json").read_text(encoding="utf-8"))
    tiles = {tile["what"]: tile["value"] for tile in content["figures"]}
    assert {"peak, predicted", "peak, measured", "step, predicted"} <= tiles.keys()
    happened = next(table for table in content["tables"] if table["title"] == "What happened")
    assert len(happened["rows"]) == len(tide.events) + 1
    tide.remove()


def test_the_caption_of_other_budgets_says_where_the_search_ended_early() -> None:
    report = _report()
    near = "Predicted: the best plan that a short search found for each budget."
    assert list(report.others) == ["every layer checkpointed", "every second layer"]
    assert document(report)["by_hand"].keys() == report.others.keys()
    assert _sweep_caption(report).startswith(f"{near} Crosses: no plan, layers checkpointed by hand;")
    report = replace(report, others={})
    sure = {budget: replace(predicted, gap=0.01) for budget, predicted in report.sweep.items()}
    assert _sweep_caption(replace(report, sweep=sure)) == near
    last = {1 << 30: replace(next(iter(sure.values())), gap=0.645)}
    assert _sweep_caption(replace(report, sweep=sure | last)) == (
        f"{near} A faster one may exist at 1.0 GiB (64.5 %): plan for that budget itself, which searches longer."
    )


def test_a_run_by_rules(tmp_path: Path) -> None:
    model = _model()
    lowtide.apply(model, {"swap": "all", "min_bytes": 0}, engine=virtual(1))
    model(torch.ones(32, 64)).sum().backward()
    text = lowtide.write_report(model, tmp_path / "run.html").read_text(encoding="utf-8")
    assert "Sequential: a run by rules" in text
    assert "saved by the rules" in text and "% of the " in text and " that a forward pass saves" in text
    assert text.count("<figure>") == 0
    with pytest.raises(
        lowtide.ConfigError, match=r"only a plan for a budget has a step on the clock; write \.html or \.json$"
    ):
        lowtide.write_report(model, tmp_path / "run.trace.json")
    lowtide.remove(model)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        lowtide.write_report(_model(), tmp_path / "run.pdf")
    assert str(caught.value) == (
        f"report: {tmp_path / 'run.pdf'}: write to a file that ends in .html, .trace.json, .json or .pickle"
    )
    with pytest.raises(lowtide.ConfigError) as caught:
        lowtide.write_report(_model(), tmp_path / "run.html")
    assert str(caught.value) == (
        "lowtide.write_report: this model is not under lowtide; give it the model or the handle that is"
    )
    run = Path(__file__).parents[2] / "examples" / "llama_bytes.yaml"
    assert main(["plan", str(run), "--budget", "64MiB", "--report", str(tmp_path / "gone" / "plan.html")]) == 2
    assert "--report: " in capsys.readouterr().err


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
needs_a_browser = pytest.mark.skipif(not BROWSER, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")


@pytest.mark.slow
@needs_a_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_it(theme: str, tmp_path: Path) -> None:
    """The page is painted in its theme, top to bottom: no picture is missing."""
    html, shot = tmp_path / "plan.html", tmp_path / "plan.png"
    html.write_text(page(_report()), encoding="utf-8")
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1060,2200", *dark]
    subprocess.run(
        [BROWSER, *flags, f"--screenshot={shot}", html.as_uri()], check=True, capture_output=True, timeout=120
    )
    from matplotlib.image import imread

    pixels = imread(shot)
    assert (pixels[2, 2, :3].mean() > 0.9) == (theme == "light")
    colours = {tuple((pixel * 255).round().astype(int)) for pixel in pixels[::7, ::7, :3].reshape(-1, 3)}
    kept = (47, 111, 176) if theme == "light" else (91, 155, 216)
    assert kept in colours


def test_beside_layers_that_run_again_stands_the_step_that_keeps_everything() -> None:
    profile = _profile()
    config = load_memory({"budget": "1GiB", "min_bytes": 0, "recompute": ["1", "2"]})
    plan = plan_profile(profile, config, link=LINK)
    report = report_of_plan(plan, profile, config, link=LINK)
    played = report.played
    assert played is not None and plan.predicted is not None
    assert max(played.plain_bytes) == plan.predicted.plain_peak_bytes > max(played.planned_bytes)
    assert sum(played.seconds) == pytest.approx(plan.predicted.plain_seconds, rel=1e-9)
    again = {event.name for event in played.events if event.name.startswith("recompute ")}
    assert again == {"recompute 1", "recompute 2"}
    assert " What a layer makes while it runs again counts as temporaries." in unescape(page(report))


# -- on a screen -------------------------------------------------------------------------------------------------------

_WIDER = """<script>
const wide = [...document.querySelectorAll("body *")].filter(each => !each.closest(".wide > *, pre *") &&
  each.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(each => each.outerHTML);
if (document.documentElement.scrollWidth > document.documentElement.clientWidth) wide.push("the page itself");
document.body.innerHTML = "<p id=found>" + JSON.stringify([innerWidth, wide]) + "</p>";
</script></body>"""


def test_what_is_wide_scrolls_in_a_box_of_its_own() -> None:
    """Tables, pictures and text in columns: the page is never wider than the screen. Each picture has both themes."""
    text = page(_report())
    assert text.count('<div class="wide">') == text.count("<table>") + text.count("<picture>") > 3
    assert text.count("prefers-color-scheme: dark)") == 1 + text.count("<picture>")
    assert re.search(r"\npre \{[^}]*overflow-x: auto", text) and ".wide { overflow-x: auto; }" in text
    assert 'name="viewport" content="width=device-width' in text


@pytest.mark.slow
@needs_a_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_in_a_browser(width: int, theme: str, tmp_path: Path) -> None:
    framed = tmp_path / "framed.html"
    (tmp_path / "run.html").write_text(page(_report()).replace("</body>", _WIDER), encoding="utf-8")
    # A window is never narrower than 500 points; a frame is.
    framed.write_text(f'<iframe src="run.html" width="{width}" height="900"></iframe>', encoding="utf-8")
    scheme = {"light": "1", "dark": "0"}[theme]
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [
        f"--blink-settings=preferredColorScheme={scheme}",
        "--virtual-time-budget=5000",
        "--window-size=1400,1000",
    ]
    script = 'onload = () => document.title = frames[0].document.getElementById("found").textContent'
    framed.write_text(f"{framed.read_text(encoding='utf-8')}<script>{script}</script>", encoding="utf-8")
    done = subprocess.run([*command, "--dump-dom", framed.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found is not None, done.stderr
    assert json.loads(unescape(found[1])) == [width, []]
