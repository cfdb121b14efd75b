"""Run files: what they say, and every mistake in them as one line with its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.cli.run_file import load_run
from lowtide.errors import ConfigError

GOOD = "model: {model_type: llama, hidden_size: 64}\ntrain: {steps: 3}\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def message(text: str) -> str:
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_run("run.yaml")
    return str(error.value)


def test_what_is_left_out_has_a_default() -> None:
    Path("run.yaml").write_text(GOOD)
    run = load_run("run.yaml")
    assert (run.model.model_type, dict(run.model.fields), run.model.dtype) == ("llama", {"hidden_size": 64}, "float32")
    assert run.memory is None
    assert (run.output_dir, run.checkpoint_dir) == (Path("runs/run"), Path("runs/run/checkpoints"))
    assert (run.data.files, run.train.steps, run.train.resume) == ((), 3, "auto")


def test_dtype_follows_precision() -> None:
    Path("run.yaml").write_text("model: {model_type: llama}\ntrain: {steps: 3, precision: bf16}\n")
    assert load_run("run.yaml").model.dtype == "bfloat16"


def test_memory_section_is_read_with_its_places() -> None:
    Path("run.yaml").write_text(GOOD + "memory:\n  recompute: [layers.0]\n  min_bytes: 2MiB\n")
    memory = load_run("run.yaml").memory
    assert memory is not None
    assert memory.min_bytes == 2 << 20
    assert memory.locations.of("recompute[0]") == "run.yaml:4:15"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: {model_type: llama}\ntrain:\n  stepps: 3\n",
            "run.yaml:3:3: unknown key 'train.stepps'; did you mean 'steps'?",
        ),
        (
            "model: {model_type: llama}\ntrian: {steps: 1}\n",
            "run.yaml:2:1: unknown section 'trian'; did you mean 'train'?",
        ),
        (
            GOOD + "recompute_confg: {recompute: true}\n",
            "run.yaml:3:1: unknown section 'recompute_confg'; did you mean 'recompute_config'?",
        ),
        (
            GOOD + "optimiser: adamw\n",
            "run.yaml:3:1: unknown section 'optimiser'; known sections: model, data, train, memory, pipeline, parallel",
        ),
        (
            GOOD + "memory: 20GiB\n",
            "run.yaml:3:9: expected a mapping or null for 'memory', not '20GiB'; write 'key: value', with these keys: "
            "budget, host_budget, disk_budget, disk_path, recompute, swap, keep, optimizer, weights, loss, rows, "
            "row_wise, min_bytes, check, strict, layers",
        ),
        (
            GOOD + "memory: {keep: layers.3}\n",
            "run.yaml:3:16: expected a list for 'memory.keep', not 'layers.3'; write [layers.3]",
        ),
        (
            GOOD + "recompute_config: {recompute: true}\nmemory: {budget: 20GiB}\n",
            "run.yaml:4:18: 'memory.budget' cannot stand beside recompute_config and swap_config; write all of it "
            "here, or all of it there",
        ),
        (
            "model: {model_type: llama}\ntrain: {}\n",
            "run.yaml:2:8: missing key 'train.steps'; expected an integer",
        ),
        (
            GOOD + "memory:\n  budgett: 3\n",
            "run.yaml:4:3: unknown key 'memory.budgett'; did you mean 'budget'?",
        ),
        (
            GOOD + "pipeline: {stages: 2}\n",
            "run.yaml:3:11: missing key 'pipeline.micro_batches'; expected an integer",
        ),
        (
            GOOD + "memory: {budget: 20GiB, rows: 64}\npipeline: {stages: 2, micro_batches: 4}\n",
            "run.yaml:3:31: 'memory.rows' cannot stand beside a budget and 'pipeline' yet; leave it out",
        ),
        (
            GOOD + "memory: {budget: 20GiB, weights: swap}\npipeline: {stages: 2, micro_batches: 4}\n",
            "run.yaml:3:34: 'memory.weights' cannot stand beside a budget and 'pipeline' yet; leave it out",
        ),
        (
            "model: {model_type: llama}\ntrain: {steps: 0}\n",
            "run.yaml:2:16: 'train.steps' must be at least 1, not 0",
        ),
        (
            "model: {model_type: llama}\ntrain: {steps: 1, learning_rate: 0}\n",
            "run.yaml:2:34: 'train.learning_rate' must be above 0, not 0.0",
        ),
        (
            GOOD + "data: {sequence_length: 1}\n",
            "run.yaml:3:25: 'data.sequence_length' must be at least 2, not 1",
        ),
        (
            "model: {model_type: llama}\ntrain: {steps: 1, precision: bf61}\n",
            "run.yaml:2:30: expected float32, bf16_autocast or bf16 for 'train.precision', not 'bf61'; "
            "did you mean 'bf16'?",
        ),
        (
            "model: {model_typ: llama}\ntrain: {steps: 1}\n",
            "run.yaml:1:9: unknown key 'model.model_typ'; did you mean 'model_type'?",
        ),
        (
            "model: {hidden_size: 64}\ntrain: {steps: 1}\n",
            "run.yaml:1:8: 'model' needs either 'path' or 'model_type'; write e.g. model_type: llama",
        ),
        (
            "model: {model_type: llama, path: .}\ntrain: {steps: 1}\n",
            "run.yaml:1:8: 'model' needs either 'path' or 'model_type', not both; remove one of them",
        ),
        (
            "model: {path: ., hidden_size: 64}\ntrain: {steps: 1}\n",
            "run.yaml:1:18: unknown key 'model.hidden_size'; a model from a folder takes only path, dtype, "
            "seed and lora",
        ),
        (
            "model: {path: nowhere}\ntrain: {steps: 1}\n",
            "run.yaml:1:15: 'model.path': nowhere is not a folder on this machine; check the path (nothing is "
            "downloaded)",
        ),
        (
            "model: {model_type: llama, dtype: bfloat61}\ntrain: {steps: 1}\n",
            "run.yaml:1:35: expected float32 or bfloat16 for 'model.dtype', not 'bfloat61'; did you mean 'bfloat16'?",
        ),
        (
            "model: {model_type: llama, seed: true}\ntrain: {steps: 1}\n",
            "run.yaml:1:34: expected an integer for 'model.seed', not 'true'",
        ),
        (
            "model: {model_type: llama, dtype: bfloat16}\ntrain: {steps: 1}\n",
            "run.yaml:1:35: 'model.dtype' is bfloat16, but 'train.precision' float32 has float32 weights; "
            "leave one of them out",
        ),
        (
            "model: {model_type: llama}\ntrain: {steps: 1, engine: host}\n",
            "run.yaml:2:27: 'train.engine' needs a 'memory' section; add one or remove the key",
        ),
    ],
)
def test_mistakes(text: str, expected: str) -> None:
    assert message(text) == expected


def test_reading_a_run_file_does_not_import_torch() -> None:
    Path("run.yaml").write_text(GOOD)
    code = (
        "import sys; from lowtide.cli import commands; from lowtide.cli.run_file import load_run; "
        "load_run('run.yaml'); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(root)}, timeout=200
    )
    assert done.stdout == "[]\n", done.stderr
