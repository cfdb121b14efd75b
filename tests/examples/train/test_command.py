"""`python -m examples.train`, and the door `lowtide train`, as a person runs them: output and exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.cli import commands as door
from lowtide.cli.main import main
from tests.support import processes
from tests.support.grid import one_of
from tests.support.trained import bits_of, losses

ROOT = Path(__file__).parents[3]
RUN = """\
model:
  model_type: gpt2
  n_embd: 16
  n_layer: 2
  n_head: 2
data:
  files: [text]
  sequence_length: 16
train:
  steps: {steps}
  batch_size: 2
  device: cpu
  log_every: 2
  checkpoint_every: 50
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(200)))


def num_steps_done(folder: str) -> int:
    path = Path(folder, "metrics.jsonl")
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.extended)])
def test_ended_in_the_middle_and_run_again_is_one_whole_run(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real process, a real signal, a model with dropout: the same losses and weights to the bit."""
    steps = 60
    Path("run.yaml").write_text(RUN.format(steps=steps).replace("checkpoint_every: 50", "checkpoint_every: 4"))
    code = "import runpy; runpy.run_module('examples.train', run_name='__main__')"
    broken = processes.start(code, Path.cwd(), "run.yaml", "--output-dir", "parts")
    deadline = time.monotonic() + 300
    while num_steps_done("parts") < 6 and broken.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(broken.pid, number)
    status, out, err = processes.finish(broken, Path.cwd(), 120)
    assert out == ""
    newest = sorted(Path("parts/checkpoints").glob("step-*"))[-1]
    if number == signal.SIGTERM:
        assert status == 143, err
        done = num_steps_done("parts")
        assert 6 <= done < steps
        assert "lowtide: SIGTERM: finishing this step, then saving" in err
        assert f"stopped by SIGTERM after step {done} of {steps}; saved {newest}" in err
    else:
        assert status == -signal.SIGKILL

    for folder in ("whole", "parts"):
        assert main(["train", "run.yaml", "--output-dir", folder]) == 0
    assert f"resumed from {newest}" in capsys.readouterr().err
    assert bits_of("whole") == bits_of("parts")
    assert num_steps_done("whole") == steps


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once() -> None:
    """The first one is noted; a step that hangs is not waited for after the second."""
    code = """
import os, signal, time
from examples.train.ranks import StopRequest
with StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("and here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(300)
"""
    status, out, err = processes.program(code, Path.cwd())
    assert status == -signal.SIGINT
    assert out == "still here\nand here\n"
    assert err == "lowtide: SIGINT: finishing this step, then saving (Ctrl-C twice: end at once)\n"


def test_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN.format(steps="many"))
    assert main(["train", "run.yaml"]) == 2
    assert capsys.readouterr().err == "run.yaml:10:10: expected an integer for 'train.steps', not 'many'\n"


def test_mistake_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN.format(steps=1))
    assert main(["train", "run.yaml", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "--steps: must be at least 1, not 0\n"


def test_only_the_first_rank_complains(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == ""


def test_memory_section_asks_for_aligned_storages_before_torch_comes() -> None:
    code = """
import os, sys
from lowtide.cli.main import main
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch", os.environ.get("THP_MEM_ALLOC_ENABLE"))
            os._exit(0)
sys.meta_path.insert(0, Look())
main(["train", "run.yaml"])
"""
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    for text, expected in ((RUN, "None"), (RUN + "memory:\n  recompute: [transformer.h.0]\n", "1")):
        Path("run.yaml").write_text(text.format(steps=1))
        done = subprocess.run(
            [sys.executable, "-uc", code],
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.stdout == f"torch {expected}\n", done.stderr


def test_failed_run_has_status_1_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = RUN.format(steps=3) + "  learning_rate: 1e30\n  clip_grad_norm: null\n"
    Path("run.yaml").write_text(text)
    assert main(["train", "run.yaml", "--output-dir", "out"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("lowtide: step 2: ")


def test_a_run_that_is_out_of_memory_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torch's allocator has to say; an exabyte is more than any machine gives."""
    import torch

    from examples.train.trainer import Trainer

    Path("run.yaml").write_text(RUN.format(steps=3))
    monkeypatch.setattr(Trainer, "_run_micro_batch", lambda *args, **kwargs: torch.empty(1 << 60, dtype=torch.uint8))
    assert main(["train", "run.yaml", "--output-dir", "out"]) == 1
    (*_, line) = capsys.readouterr().err.splitlines()
    assert line.startswith("lowtide: step 1: out of memory: ")
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1152921504606846976 bytes" in line
    assert line.endswith("; lower train.batch_size, or write a budget into the section 'memory'")


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN.format(steps=3))
    assert main(["train", "run.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[-1] == "done: 3 steps; saved runs/run/checkpoints/step-00000003"


def test_the_door_says_where_the_trainer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door, "_CLONE", tmp_path)
    assert main(["train", "run.yaml"]) == 2
    assert capsys.readouterr().err == (
        "lowtide train: the trainer is an example and not in this installation; in a clone of lowtide's repository "
        "write: python -m examples.train RUN.yaml\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(3, ["deepseek_v3", "qwen3_moe", "llama"]))
def test_examples_learn(name: str) -> None:
    assert main(["train", str(ROOT / "examples" / f"{name}_bytes.yaml"), "--output-dir", "out", "--steps", "15"]) == 0
    found = losses("out")
    assert found[0] > 5
    assert found[-1] < 4.5
