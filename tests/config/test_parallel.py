"""The `parallel` section: what it says, and every mistake in it as one line with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.cli.run_file import load_run
from lowtide.errors import ConfigError

START = "model: {model_type: llama}\ntrain: {steps: 3}\nparallel:\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_left_out_is_free() -> None:
    Path("run.yaml").write_text(START + "  pipeline: 4\n  data: 2\n  layers: [3, 5]\n")
    parallel = load_run("run.yaml").parallel
    assert parallel is not None
    assert parallel.pinned() == {"pipeline": 4, "data": 2}
    assert (parallel.schedule, parallel.layers, parallel.precision) == ("auto", (3, 5), "bf16")
    Path("run.yaml").write_text(START.replace("parallel:\n", ""))
    assert load_run("run.yaml").parallel is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  pipelin: 4\n", "run.yaml:4:3: unknown key 'parallel.pipelin'; did you mean 'pipeline'?"),
        ("  tensor: 0\n", "run.yaml:4:11: 'parallel.tensor' must be at least 1, not 0"),
        ("  data: 99999999\n", "run.yaml:4:9: 'parallel.data' must be at most 16777216, not 99999999"),
        ("  schedule: dualpipe5\n",
         "run.yaml:4:13: expected auto, 1f1b, interleaved, interleaved_overlap, zb_v, dualpipev, dualpipe or "
         "one_stage_overlap for 'parallel.schedule', not 'dualpipe5'; did you mean 'dualpipe'?"),
        ("  layers: []\n",
         "run.yaml:4:11: 'parallel.layers' must be one number of layers for each stage, none of them below 0"),
        ("  schedule: one_stage_overlap\n  pipeline: 2\n",
         "run.yaml:4:13: 'parallel.schedule' 'one_stage_overlap' is for 1 pipeline rank, not 2"),
        ("  shard: hsdp\n",
         "run.yaml:4:3: 'parallel.replicas' goes with 'shard: hsdp', and that needs it; write e.g. replicas: 2"),
        ("  shard: hsdp\n  replicas: 2\n  data: 3\n",
         "run.yaml:5:13: 'parallel.replicas' must divide the 3 data ranks, and 2 does not"),
        ("  shard: fsdp2\n  data: 8\n  precision: fp8\n",
         "run.yaml:6:14: 'parallel.precision' cannot stand beside 'shard', which takes data, replicas and tensor"),
    ],
)  # fmt: skip
def test_mistakes(text: str, expected: str) -> None:
    Path("run.yaml").write_text(START + text)
    with pytest.raises(ConfigError) as error:
        load_run("run.yaml")
    assert str(error.value) == expected


def test_beside_upstreams_sections_it_is_upstreams() -> None:
    Path("run.yaml").write_text(
        "model: {model_type: llama, num_hidden_layers: 2}\ntrain: {steps: 3}\nrecompute_config: {recompute: true}\n"
        "parallel: {parallel_mode: 1}\n"
    )
    assert load_run("run.yaml").parallel is None


def test_nobody_trains_with_it_without_shards(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(START + "  data: 2\n")
    assert main(["train", "run.yaml"]) == 2
    assert capsys.readouterr().err == (
        "run.yaml:4:3: 'parallel' without 'shard' is planned for, not trained with, in this version; add shard: fsdp2, "
        "or remove it to train\n"
    )
