"""`memory.optimizer` in the trainer: the same bits, and checkpoints that fit runs of either kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.train.trainer import train
from lowtide.cli.run_file import load_run
from tests.support.trained import bits_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(200)))


def go(folder: str, steps: int = 3, engine: str = "host", **memory: object) -> tuple[list[float], str]:
    """The bits of the run."""
    sections: dict[str, dict] = {
        "model": LLAMA,
        "data": {"files": ["text"], "sequence_length": 64},
        "train": {"steps": steps, "batch_size": 2, "device": "cpu", "output_dir": folder},
    }
    if memory:
        sections["memory"] = {"min_bytes": 1024, **memory}
        sections["train"] |= {"engine": engine}
    Path("run.yaml").write_text("".join(f"{name}: {json.dumps(section)}\n" for name, section in sections.items()))
    train(load_run(Path("run.yaml")))
    return bits_of(folder)


def test_swapped_state_trains_to_the_same_bits_and_resumes_either_way() -> None:
    plain = go("plain")
    assert go("rules", engine="host", optimizer="swap") == plain
    assert go("budget", optimizer="swap", budget="1GiB") == plain
    go("there", steps=2)
    assert go("there", optimizer="swap") == plain
    go("back", steps=2, optimizer="swap", recompute="all")
    assert go("back") == plain
