"""`lowtide plan --largest`: the search, and what it prints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lowtide.cli.largest import Trial, next_size
from lowtide.cli.main import main

RUN = """\
model:
  model_type: llama
  vocab_size: 2048
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 2
  max_position_embeddings: 65536
data:
  files: [text]
  sequence_length: 256
train:
  steps: 4
  batch_size: 1
  device: cpu
memory:
  budget: 24MiB
  min_bytes: 1KiB
  loss: {rows: 512}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"tea\n" * 2000)
    Path("run.yaml").write_text(RUN, encoding="utf-8")


@pytest.mark.parametrize("seed", range(40))
def test_the_search_ends_close_to_the_largest_that_fits(seed: int) -> None:
    draw = random.Random(seed)
    fixed, slope, bend = draw.uniform(0, 1e9), draw.uniform(1, 1e6), draw.choice([0, 0, 1e-3, 1])
    budget, unit = draw.uniform(1, 50) * 1e9, draw.choice([1, 64])

    def floor(size: int) -> int:
        return int(fixed + slope * size + bend * size**2)

    floors: dict[int, int] = {}
    size: int | None = draw.choice([unit, 8 * unit, 4096, 10**6])
    while size is not None:
        assert size not in floors
        floors[size] = floor(size)
        size = next_size(floors, int(budget), unit)
    fits = [size for size in floors if floors[size] <= budget]
    if fits:
        assert floor(int(1.021 * max(fits)) + unit) > budget
    else:
        assert floor(unit) > budget
    assert len(floors) <= 30


def test_a_jump_of_the_floor_is_found_too() -> None:
    floors, size = {}, 1000
    while size is not None:
        floors[size] = 10 if size <= 77_777 else 2**60
        size = next_size(floors, 100, 64)  # type: ignore[assignment]
    assert 76_000 < max(size for size, floor in floors.items() if floor == 10) <= 77_777


def test_the_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--hardware", "h200", "--largest", "sequence"]) == 0
    head, *rows, found, beyond = capsys.readouterr().out.splitlines()
    assert head.split() == ["sequence", "step", "tokens/s", "peak", "host", "disk", "floor"]
    sizes = {int(row.split()[0].replace(",", "")): "no plan" not in row for row in rows}
    fits = max(size for size, is_planned in sizes.items() if is_planned)
    fails = min(size for size, is_planned in sizes.items() if not is_planned)
    assert 256 in sizes and fits < fails <= 1.03 * fits + 64
    assert found == f"largest sequence in 24.0 MiB: {fits:,}"
    assert beyond.startswith(f"beyond, at {fails:,}: budget 24.0 MiB: no plan fits; the least that can be reached is ")


def test_a_size_without_a_plan_as_json() -> None:
    trial = Trial(size=64, tokens=128, floor_bytes=2**30, plan=None, why="no plan fits")
    assert json.loads(json.dumps(trial.document())) == {
        "size": 64,
        "tokens": 128,
        "floor_bytes": 2**30,
        "why": "no plan fits",
        "fits": False,
    }


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--hardware", "h200", "--largest", "batch", "--out", "plan.json"]) == 2
    line = "--out: is about one step, and --largest plans many; leave one of them out"
    assert capsys.readouterr().err.strip() == line
