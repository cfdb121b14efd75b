"""Memory snapshots: torch's own reader takes them, their bytes are the plan's, and the viewer knows their pickle."""

from __future__ import annotations

import importlib
import pickle
import pickletools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli.main import main
from lowtide.config.memory import load_memory
from lowtide.core.profile import Profile
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling.fake.trace import trace as trace_fake
from lowtide.report.played_step import OWNERS, Played, play
from lowtide.report.write import snapshot, to_bytes
from lowtide.timeline.hardware import load_hardware
from lowtide.timeline.step import Link
from tests.support.virtual_engine import virtual

LINK = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9)
VIEWERS_OPCODES = {
    *("APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET"),
    *("MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT"),
    *("BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST"),
    *("DICT", "SETITEM"),
}
"""That `unpickle` of torch/utils/viz/MemoryViz.js knows."""


@pytest.fixture(scope="module")
def memory_viz() -> ModuleType:
    try:
        return importlib.import_module("torch.cuda._memory_viz")
    except ImportError as error:  # pragma: no cover
        pytest.skip(f"torch's reader of snapshots cannot be imported here: {error}")


def profiled(optimizer: bool = False) -> Profile:
    torch.manual_seed(0)
    width = 128 if optimizer else 64  # smaller state stays where it is
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(4))
    model = nn.Sequential(*layers)
    kind = torch.optim.Adam(model.parameters()) if optimizer else None
    how: Any = {"hardware": load_hardware("cpu"), "loss": torch.sum, "optimizer": kind}
    return trace_fake(model, (torch.zeros(512, width),), **how)


def played(profile: Profile, share: float, **memory: Any) -> Played:
    config = load_memory({"budget": "1GiB", "min_bytes": 0, **memory})
    whole = plan_profile(profile, config, link=LINK).predicted
    assert whole is not None
    budget = int(whole.floor_bytes + share * (whole.plain_peak_bytes - whole.floor_bytes))
    config = load_memory({"budget": budget, "min_bytes": 0, **memory})
    return play(plan_profile(profile, config, link=LINK), profile, config, link=LINK)


@pytest.fixture(scope="module")
def step() -> Played:
    return played(profiled(), 0.4)


def live_curve(document: dict[str, Any], device: int = 0) -> dict[int, int]:
    """Bytes after the last event of each microsecond; each address is taken once, and lies in the segment."""
    segment = document["segments"][device]
    taken: dict[int, int] = {}
    found = {}
    for event in document["device_traces"][device]:
        start, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(start >= at + nbytes or start + size <= at for at, nbytes in taken.items())
            assert segment["address"] <= start <= start + size <= segment["address"] + segment["total_size"]
            taken[start] = size
        elif event["action"] == "free_completed":
            assert taken.pop(start) == size
        found[event["time_us"]] = sum(taken.values())
    assert sum(taken.values()) == segment["allocated_size"]
    return found


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_the_bytes_are_those_of_the_plan(share: float) -> None:
    of_plan = played(profiled(), share)
    found = live_curve(snapshot(of_plan))
    assert max(found.values()) == max(of_plan.planned_bytes)
    last_of = dict(zip((round(start * 1e6) for start in of_plan.starts), of_plan.planned_bytes, strict=True))
    assert {at: found[at] for at in last_of if at in found and at != max(found)} == {
        at: nbytes for at, nbytes in last_of.items() if at in found and at != max(found)
    }


def test_every_activation_that_moves_is_named(step: Played) -> None:
    names = [frame["name"] for event in snapshot(step)["device_traces"][0] for frame in event["frames"]]
    assert {block.name for block in step.blocks} <= set(names)
    assert {"kept", "recomputed, while here"} <= set(names)


def test_torch_reads_it(step: Played, memory_viz: ModuleType, tmp_path: Path) -> None:
    """Its own checks of sums raise where segments and blocks do not add up."""
    document = pickle.loads(to_bytes(snapshot(step)))
    text = memory_viz.segsum(document)
    assert "segments: 1" in text
    assert "total_reserved" in text
    trace = memory_viz.trace(document)
    num_blocks = sum(event["action"] == "alloc" for event in document["device_traces"][0])
    assert trace.count("cudaMalloc") == 1
    assert trace.count("[") >= num_blocks
    flames = memory_viz.memory(document, format_flamegraph=lambda lines: lines)
    left = [line for line in flames.splitlines() if ";active_allocated;" in line]
    allocated = sum(segment["allocated_size"] for segment in document["segments"])
    assert sum(int(line.rsplit(" ", 1)[1]) for line in left) == allocated
    memory_viz.trace_plot(document)
    (tmp_path / "plan.pickle").write_bytes(to_bytes(document))


def test_the_viewer_knows_its_pickle(step: Played) -> None:
    """Its reader raises at an opcode, a protocol or a category that it does not know."""
    data = to_bytes(snapshot(step))
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert opcodes <= VIEWERS_OPCODES
    assert 2 <= data[1] <= 4
    document = pickle.loads(data)
    categories = {event["category"] for event in document["device_traces"][0] if "category" in event}
    assert {"unknown"} < categories <= {"unknown", *OWNERS}
    assert all(-(2**53) < event["addr"] < 2**53 for event in document["device_traces"][0])  # a number of JavaScript


def test_optimizer_state_that_travels_is_in_the_owners_curve() -> None:
    """Its bytes are there as state when they are on the device, and only then."""
    profile = profiled(optimizer=True)
    travels = played(profile, 0.5, optimizer="swap", recompute="none")
    blocks = [block for block in travels.blocks if block.name.startswith("optimizer state ")]
    assert blocks and {block.owner for block in blocks} == {0}
    num_ticks = len(travels.starts)
    moved = [sum(b.nbytes for b in blocks if b.start <= tick < b.end) for tick in range(num_ticks)]
    assert min(moved[1:]) < max(moved)
    stays = played(profile, 1.0, optimizer="keep", recompute="none")
    ticks = range(1, num_ticks - 1)
    state = sum(block.nbytes for block in {block.name: block for block in blocks}.values())
    assert [travels.bytes_by_owner[0][tick] for tick in ticks] == [
        stays.bytes_by_owner[0][tick] - state + moved[tick] for tick in ticks
    ]
    assert tuple(map(sum, zip(*travels.bytes_by_owner, strict=True))) == travels.planned_bytes
    assert max(live_curve(snapshot(travels)).values()) == max(travels.planned_bytes)


def test_what_has_no_block_is_what_recipes_need() -> None:
    of_plan = played(profiled(), 0.1)
    made = [0] * len(of_plan.starts)
    for block in of_plan.blocks:
        for tick in range(block.start, block.end):
            made[tick] += block.nbytes * (block.owner == 3)
    work = [all_made - named for all_made, named in zip(of_plan.bytes_by_owner[3], made, strict=True)]
    assert min(work) >= 0
    for owner in (1, 2):
        named = [sum(b.nbytes for b in of_plan.blocks if b.owner == owner and b.start <= t < b.end) for t in range(5)]
        assert named == list(of_plan.bytes_by_owner[owner][:5])


def test_a_step_keeps_its_blocks_in_a_file(step: Played) -> None:
    assert Played.from_json(step.to_json()) == step


def test_a_plan_that_never_ran_and_a_model_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(__file__).parents[2] / "examples" / "llama_bytes.yaml"
    assert main(["plan", str(run), "--budget", "64MiB", "--report", str(tmp_path / "plan.pickle")]) == 0
    peak = max(live_curve(pickle.loads((tmp_path / "plan.pickle").read_bytes())).values())
    assert peak <= 64 << 20
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    tide = lowtide.optimize(model, budget="1GiB", memory={"min_bytes": 0}, engine=virtual(1))
    model(torch.ones(32, 64)).sum().backward()
    document = pickle.loads(lowtide.write_report(tide, tmp_path / "run.pickle").read_bytes())
    assert max(live_curve(document).values()) == tide.plan.predicted.peak_bytes
    tide.remove()
    lowtide.apply(model, {"swap": "all", "min_bytes": 0}, engine=virtual(1))
    model(torch.ones(32, 64)).sum().backward()
    with pytest.raises(lowtide.ConfigError) as caught:
        lowtide.write_report(model, tmp_path / "run.pickle")
    assert str(caught.value) == (
        f"report: {tmp_path / 'run.pickle'}: only a plan for a budget has a step on the clock; write .html or .json"
    )
    lowtide.remove(model)
