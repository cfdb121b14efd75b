"""The trainer: the same bits across interruptions, exact accumulation, and clear ends."""

from __future__ import annotations

import json
import math
import random
import signal
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.train import checkpoint
from examples.train.ranks import TrainingError
from examples.train.trainer import Trainer, learning_rate_at, settings_of, train
from lowtide.cli.run_file import load_run
from lowtide.config.run import TrainConfig
from lowtide.errors import ConfigError
from tests.support import two_ranks
from tests.support.trained import bits_of, losses, steps_of, weights_sha256

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_dropout": 0.1,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}
"""Three kinds of dropout, all on by default."""

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(200)))


def write(
    *, model: dict[str, object] = LLAMA, memory: str = "", sequence_length: int = 16, **train_keys: object
) -> Path:
    """run.yaml in the current folder."""
    keys = {"steps": 6, "batch_size": 2, "device": "cpu", "warmup_steps": 2, **train_keys}
    sections = {"model": model, "data": {"files": ["te*t"], "sequence_length": sequence_length}, "train": keys}
    path = Path("run.yaml")
    path.write_text("".join(f"{name}: {json.dumps(section)}\n" for name, section in sections.items()) + memory)
    return path


def go(on_step: Callable[[Mapping[str, Any]], None] | None = None, **keys: object) -> signal.Signals | None:
    return train(load_run(write(**keys)), on_step=on_step)  # type: ignore[arg-type]


def error_of(kind: type[Exception] = ConfigError, **keys: object) -> str:
    with pytest.raises(kind) as error:
        go(**keys)  # type: ignore[arg-type]
    return str(error.value)


def at_step(step: int, act: Callable[[], object]) -> Callable[[Mapping[str, Any]], None]:
    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            act()

    return on_step


# ---- the same bits


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_three_and_three_steps_are_six(model: dict[str, object]) -> None:
    go(model=model, output_dir="whole", grad_accumulation=2)
    go(model=model, output_dir="parts", grad_accumulation=2, steps=3)
    first = bits_of("parts")
    go(model=model, output_dir="parts", grad_accumulation=2)
    assert (len(first[0]), len(losses("parts"))) == (3, 6)
    assert bits_of("parts") == bits_of("whole")
    assert first[1] != bits_of("parts")[1]


def test_each_step_draws_its_own_numbers_again_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model draws from: torch, Python or numpy."""
    drawn = []

    def forward(self: Trainer, *args: object, **kwargs: object) -> torch.Tensor:
        drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))
        return torch.ones(())

    monkeypatch.setattr(Trainer, "_run_micro_batch", forward)
    go(output_dir="whole", steps=3, grad_accumulation=2)
    whole = drawn.copy()
    drawn.clear()
    go(output_dir="parts", steps=1, grad_accumulation=2)
    go(output_dir="parts", steps=3, grad_accumulation=2)
    assert drawn == whole
    assert len(set(whole)) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_run_goes_on(number: signal.Signals) -> None:
    """With a cosine, whose length must not change."""
    go(model=GPT2, output_dir="whole", schedule="cosine")
    before = signal.getsignal(number)
    ask = at_step(2, lambda: signal.raise_signal(number))
    assert go(ask, model=GPT2, output_dir="parts", schedule="cosine") is number
    assert signal.getsignal(number) == before
    assert len(losses("parts")) == 3
    assert go(model=GPT2, output_dir="parts", schedule="cosine") is None
    assert bits_of("parts") == bits_of("whole")


def test_crash_between_checkpoints_does_the_lost_steps_again() -> None:
    def crash() -> None:
        raise RuntimeError("power cut")

    go(output_dir="whole")
    with pytest.raises(RuntimeError, match="power cut"):
        go(at_step(5, crash), output_dir="parts", checkpoint_every=2)
    assert len(losses("parts")) == 5
    go(output_dir="parts", checkpoint_every=2)
    assert bits_of("parts") == bits_of("whole")


def test_memory_section_changes_no_bit() -> None:
    go(model=GPT2, output_dir="plain", steps=3)
    memory = "memory:\n  recompute: [transformer.h.0]\n  swap: [transformer.h.1]\n  min_bytes: 256\n"
    go(model=GPT2, output_dir="saving", steps=3, memory=memory)
    assert bits_of("saving") == bits_of("plain")
    last = steps_of("saving")[-1]
    assert last["tide"]["swapped_bytes"] > 0
    assert last["tide"]["recomputed_bytes"] > 0
    assert last["peak_bytes"] is not None


def test_running_out_of_memory_changes_no_bit_and_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = "memory:\n  swap: none\n"
    go(model=GPT2, output_dir="plain", steps=4, grad_accumulation=2, memory=memory)
    ordinary = Trainer._run_micro_batch
    calls: list[int] = []

    def failing(self: Trainer, *args: object, **kwargs: object) -> object:
        loss = ordinary(self, *args, **kwargs)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("made up")  # the second micro-batch of step 3, after its backward
        return loss

    monkeypatch.setattr(Trainer, "_run_micro_batch", failing)
    capsys.readouterr()
    with pytest.warns(UserWarning, match="out of memory"):
        go(model=GPT2, output_dir="tight", steps=4, grad_accumulation=2, memory=memory, log_every=100)
    assert bits_of("tight") == bits_of("plain")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 3/4")]
    assert line.endswith("out of memory, run again: 1")


# ---- one step


def test_accumulation_is_the_mean_over_all_tokens() -> None:
    model = LLAMA | {"attention_dropout": 0.0}
    go(model=model, output_dir="large", batch_size=6)
    go(model=model, output_dir="small", batch_size=2, grad_accumulation=3)
    assert losses("small") == pytest.approx(losses("large"), rel=1e-4)


def test_loss_falls() -> None:
    go(output_dir="out", steps=25, learning_rate=1e-2, batch_size=4)
    found = losses("out")
    assert found[0] == pytest.approx(math.log(256), abs=0.3)
    assert found[-1] < found[0] - 1


@pytest.mark.parametrize("precision", ["bf16_autocast", "bf16"])
def test_bf16(precision: str) -> None:
    go(output_dir="float32", steps=3)
    go(output_dir="bf16", steps=3, precision=precision)
    assert losses("bf16") != losses("float32")
    assert losses("bf16") == pytest.approx(losses("float32"), rel=0.02)


def test_settings_hold_what_shapes_the_curve_and_nothing_else(tmp_path: Path) -> None:
    def settings(**train: object) -> dict[str, object]:
        lines = "".join(f"  {key}: {value}\n" for key, value in {"steps": 3, **train}.items())
        file = tmp_path / "run.yaml"
        file.write_text(f"model: {{model_type: llama}}\ntrain:\n{lines}")
        return settings_of(load_run(str(file)))

    plain = settings()
    assert settings(steps=9, log_every=1, output_dir="elsewhere", threads=1, checkpoint_every=2) == plain
    assert settings(learning_rate=0.5) != plain
    assert settings(steps=9, schedule="cosine") != settings(steps=3, schedule="cosine")


def test_learning_rate() -> None:
    constant = TrainConfig(steps=10, learning_rate=1.0, warmup_steps=4)
    assert [learning_rate_at(step, constant) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = TrainConfig(steps=8, learning_rate=1.0, warmup_steps=4, schedule="cosine")
    assert [learning_rate_at(step, cosine) for step in (3, 4, 6, 8)] == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_loss_that_is_not_finite_stops_the_run() -> None:
    message = error_of(TrainingError, learning_rate=1e30, warmup_steps=0, clip_grad_norm=None, output_dir="out")
    assert message == (
        "step 2: the norm of the gradients is nan; stopped before it reached the weights. Lower train.learning_rate, "
        "raise train.warmup_steps, or write train.allow_non_finite: true to go on all the same"
    )
    assert len(losses("out")) == 1
    keys: dict[str, object] = {"learning_rate": 1e30, "warmup_steps": 0, "steps": 3, "output_dir": "other"}
    go(allow_non_finite=True, **keys)  # type: ignore[arg-type]
    assert len(losses("other")) == 3


# ---- where to go on


def test_never_does_not_mix_runs() -> None:
    go(output_dir="out", steps=1)
    assert error_of(output_dir="out", resume="never") == (
        f"run.yaml:3:{column('never')}: 'train.resume' is never, but out/checkpoints/step-00000001 is already there "
        "and would be mixed with the new ones; choose another 'train.output_dir', delete the folder, or write auto"
    )


def column(word: str) -> int:
    """Where a quoted word stands in the train section of run.yaml."""
    return Path("run.yaml").read_text().splitlines()[2].index(f'"{word}"') + 1


def test_resume_from_a_path() -> None:
    go(output_dir="whole", checkpoint_every=3)
    go(output_dir="parts", resume="whole/checkpoints/step-00000003")
    assert weights_sha256("parts") == weights_sha256("whole")
    assert error_of(output_dir="out", resume="atuo") == (
        f"run.yaml:3:{column('atuo')}: 'train.resume': atuo is not a checkpoint; write auto, never, or the path of a "
        "folder such as step-00000100"
    )


def test_nothing_left_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    go(output_dir="out", steps=2)
    capsys.readouterr()
    first = bits_of("out")
    go(output_dir="out", steps=2)
    assert bits_of("out") == first
    assert (
        "nothing left to do: out/checkpoints/step-00000002 has all 2 steps; raise train.steps"
        in capsys.readouterr().err
    )


def test_other_settings_are_refused() -> None:
    go(output_dir="out", steps=2)
    assert "train.batch_size was 2 and is now 3" in error_of(output_dir="out", batch_size=3)
    (path,) = Path("out/checkpoints").iterdir()
    assert json.loads((path / "run.json").read_text())["run"]["settings"]["number of ranks"] == 1
    Path("text").write_bytes(b"another text, long enough for a sequence or two")
    assert "made by a run with other settings: data.files (sha256) was '" in error_of(output_dir="out")


def test_damaged_checkpoint_is_not_taken_for_a_good_one() -> None:
    go(output_dir="out", steps=2)
    path = checkpoint.find(Path("out/checkpoints"))[-1]
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert error_of(output_dir="out") == (
        f"{path}: the checkpoint is damaged: the content of {file.name} is not what was written; delete this folder to "
        "resume from the one before it"
    )


# ---- mistakes that are seen late


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"model": {"model_type": "llama", "hiden_size": 16}},
            "run.yaml:1:32: unknown key 'model.hiden_size'; did you mean 'hidden_size'?",
        ),
        (
            {"model": {"model_type": "lama"}},
            "run.yaml:1:23: unknown model_type 'lama'; did you mean 'llama'?",
        ),
        (
            {"model": {"model_type": "vit"}},
            "run.yaml:1:23: model_type 'vit' has no causal language model; choose one that has, such as llama",
        ),
        (
            {"model": LLAMA | {"vocab_size": 255}},
            "run.yaml:1:166: 'model.vocab_size' is 255, but the text is made of bytes; expected at least 256",
        ),
        (
            {"model": {**LLAMA, "max_position_embeddings": 8}},
            "run.yaml:2:46: 'data.sequence_length' is 16, but the model has 8 positions; "
            "lower it or raise 'model.max_position_embeddings'",
        ),
        (
            {"sequence_length": 99999},
            "run.yaml:2:17: 'data.files': the text has 3690 bytes, less than one sequence of 99999; "
            "add files or lower 'data.sequence_length'",
        ),
        (
            {"device": "gpu"},
            "run.yaml:3:48: 'train.device': 'gpu' is not a device; "
            "write auto, cpu or the accelerator's name, such as cuda",
        ),
    ],
)
def test_late_mistakes(keys: dict[str, object], expected: str) -> None:
    assert error_of(**keys) == expected


def test_model_from_a_folder_that_has_none() -> None:
    Path("empty").mkdir()
    assert error_of(model={"path": "empty"}).startswith(
        "run.yaml:1:17: 'model.path': no model can be loaded from empty: "
    )


def test_file_that_does_not_exist() -> None:
    write()
    Path("text").unlink()
    with pytest.raises(ConfigError) as error:
        train(load_run("run.yaml"))
    assert str(error.value) == "run.yaml:2:18: 'data.files[0]': no file matches 'te*t'; check the path"


# ---- several ranks


def start_ranks(tmp_path: Path, code: str) -> list[two_ranks.Process]:
    """Two processes that run `code` with `train` and `run` at hand, in a gloo group."""
    script = "from lowtide.cli.run_file import load_run\nfrom examples.train.trainer import train\n"
    script += "run = load_run('run.yaml')\n"
    return two_ranks.start(script + textwrap.dedent(code), tmp_path)


@pytest.mark.slow
def test_two_ranks_train_as_one_and_resume(tmp_path: Path) -> None:
    model = LLAMA | {"attention_dropout": 0.0}
    go(model=model, output_dir="alone", batch_size=4, grad_accumulation=2)
    write(model=model, output_dir="together", grad_accumulation=2, log_every=1)
    code = """
    import dataclasses, os
    for steps, port in zip((2, 6), os.environ["MORE_PORTS"].split()):
        train(dataclasses.replace(run, train=dataclasses.replace(run.train, steps=steps)))
        os.environ["MASTER_PORT"] = port
    """
    first, second = two_ranks.finish(start_ranks(tmp_path, code), tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert losses("together") == pytest.approx(losses("alone"), rel=1e-4)
    assert "step 6/6" in first[2]
    assert "step" not in second[2]


@pytest.mark.slow
def test_failure_of_one_rank_ends_both_with_one_message(tmp_path: Path) -> None:
    write(output_dir="out", steps=1000)
    code = """
    import os
    def on_step(record):
        if record["step"] == 2 and os.environ["RANK"] == "1":
            raise RuntimeError("the dog ate the batch")
    train(run, on_step=on_step)
    """
    ranks = start_ranks(tmp_path, code)
    ranks[1].join(240)
    (status_0, _, err_0), (status_1, _, err_1) = two_ranks.finish(ranks, tmp_path)
    assert status_0 not in (0, None)
    assert status_1 not in (0, None)
    last_words = "lowtide: rank 1 failed at step 2: RuntimeError: the dog ate the batch"
    assert (err_0 + err_1).count("lowtide: rank") == 1
    assert err_1.rstrip().endswith(last_words)


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_ends_both_and_is_not_run_again(tmp_path: Path) -> None:
    write(output_dir="out", steps=1000, memory="memory:\n  swap: all\n")
    code = """
    import os, torch
    from examples.train.trainer import Trainer
    ordinary, calls = Trainer._run_micro_batch, []
    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("made up")
        return ordinary(*args, **kwargs)
    Trainer._run_micro_batch = failing
    train(run)
    """
    ranks = start_ranks(tmp_path, code)
    ranks[1].join(240)
    (status_0, _, err_0), (status_1, _, err_1) = two_ranks.finish(ranks, tmp_path)
    assert status_0 not in (0, None)
    assert status_1 not in (0, None)
    assert "lowtide: this micro-batch was not run again: this process is one of 2 ranks" in err_1
    assert (err_0 + err_1).count("lowtide: rank") == 1
    assert err_1.rstrip().endswith("lowtide: rank 1 failed at step 2: OutOfMemoryError: made up")


@pytest.mark.slow
def test_rank_that_dies_without_a_word_does_not_leave_the_other_waiting(tmp_path: Path) -> None:
    write(output_dir="out", steps=100000)
    code = """
    import os, signal
    def on_step(record):
        if record["step"] == 2 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    train(run, on_step=on_step)
    """
    ranks = start_ranks(tmp_path, code)
    ranks[0].join(240)
    (status_0, _, _), (status_1, _, err_1) = two_ranks.finish(ranks, tmp_path)
    assert status_0 == -signal.SIGKILL
    assert status_1 == 1
    assert "lowtide: rank 1" in err_1
