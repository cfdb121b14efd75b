"""`train.expert_parallel` on two ranks: twenty steps, a checkpoint in the middle, and what is refused."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from examples.train.trainer import train
from lowtide.cli.run_file import load_run
from lowtide.cli.run_step import observe_run, trace_run
from lowtide.config.source import read_yaml
from lowtide.errors import ConfigError
from lowtide.timeline.hardware import load_hardware
from tests.support import two_ranks
from tests.support.trained import losses

EXAMPLE = Path(__file__).parents[3] / "examples" / "deepseek_v3_experts.yaml"
STEPS = 8

RUNS = """
import dataclasses, os, sys
from lowtide.errors import ConfigError
from lowtide.timeline.hardware import load_hardware
from examples.train.ranks import Ranks
from examples.train.trainer import train
from lowtide.cli.run_file import load_run
from tests.support.trained import weights_sha256

def refused(self, error):  # else it would end the process, and the jobs that come after it
    os.environ["REFUSED"] = f"{type(error).__name__}: {error}"
    self.leave()
    raise SystemExit

Ranks.fail = refused
ports = iter(os.environ["MORE_PORTS"].split())

def go(name, steps=8, **keys):
    run = load_run("run.yaml")
    memory = keys.pop("memory", run.memory)
    how = dataclasses.replace(run.train, steps=steps, **keys)
    try:
        run = dataclasses.replace(run, train=how, memory=memory, output_dir=run.output_dir / name)
        train(run)
        return weights_sha256(run.output_dir)
    except SystemExit:
        return os.environ["REFUSED"]
    finally:
        os.environ["MASTER_PORT"] = next(ports, "")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With run.yaml: the example, smaller."""
    folder = tmp_path_factory.mktemp("experts")
    text = EXAMPLE.read_text().replace("sequence_length: 128", "sequence_length: 16\n  files: [text]")
    (folder / "text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(2000)))
    text = text.replace("log_every: 10", "device: cpu\n  grad_accumulation: 2")
    (folder / "run.yaml").write_text(text.replace("batch_size: 4", "batch_size: 2").replace("1KiB", "0"))
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    code = """
    import json
    found = {"whole": go("whole", checkpoint_every=4)}
    found["resumed"] = go("resumed", resume="runs/run/whole/checkpoints/step-00000004")
    found["plain"] = go("plain", steps=4, memory=None)
    found["each has all"] = go("each", steps=3, expert_parallel=1, memory=None)
    found["another split"] = go("whole", expert_parallel=1)
    found["three"] = go("three", expert_parallel=3)
    print(json.dumps(found))
    """
    first, _ = two_ranks.answers(RUNS + textwrap.dedent(code), folder, seconds=600)
    return first


def _losses(folder: Path, name: str) -> list[float]:
    return losses(folder / "runs" / "run" / name)


@pytest.mark.slow
def test_it_learns_as_a_model_that_is_not_split(answers: dict[str, Any], folder: Path) -> None:
    """Up to rounding, since sums are in another order."""
    whole, each = _losses(folder, "whole"), _losses(folder, "each")
    assert len(whole) == STEPS
    assert whole[-1] < whole[0] - 1
    assert whole[:3] == pytest.approx(each, rel=1e-3)


@pytest.mark.slow
def test_memory_changes_no_bit(answers: dict[str, Any], folder: Path) -> None:
    assert _losses(folder, "whole")[:4] == _losses(folder, "plain")


@pytest.mark.slow
def test_a_checkpoint_resumes_to_the_same_curve(answers: dict[str, Any], folder: Path) -> None:
    assert answers["resumed"] == answers["whole"]
    assert _losses(folder, "resumed") == _losses(folder, "whole")[4:]


@pytest.mark.slow
def test_a_checkpoint_has_every_expert_once(answers: dict[str, Any], folder: Path) -> None:
    found = folder / "runs" / "run" / "whole" / "checkpoints" / "step-00000008"
    shapes: dict[str, list[int]] = {}
    for file in found.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- it is no mapping
                assert name not in shapes
                shapes[name] = tensors.get_slice(name).get_shape()
    name = "model.model.layers.1.mlp.experts.down_proj"
    for rank in (0, 1):
        assert shapes[f"{name}[{rank}/2]"] == [4, 64, 32]
        assert f"optimizer.exp_avg.{name.removeprefix('model.')}[{rank}/2]" in shapes


@pytest.mark.slow
def test_another_split_is_refused(answers: dict[str, Any]) -> None:
    assert answers["another split"] == (
        "ConfigError: runs/run/whole/checkpoints/step-00000008: made by a run with other settings: "
        "train.expert_parallel was 2 and is now 1; put them back, or start a new run with another train.output_dir"
    )


@pytest.mark.slow
def test_ranks_that_do_not_divide_are_refused(answers: dict[str, Any], folder: Path) -> None:
    place = read_yaml(folder / "run.yaml").entries[2].node.entries[2].node.place
    where = place.replace(f"{folder}/", "")
    assert answers["three"] == (
        f"ConfigError: {where}: 'train.expert_parallel' is 3, but there are 2 ranks; start it with torchrun "
        "--nproc-per-node 3, or a multiple of that"
    )


def test_one_rank_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run = load_run("run.yaml")
    message = "'train.expert_parallel' is 2, but there is 1 rank; start it with torchrun --nproc-per-node 2, or a"
    with pytest.raises(ConfigError, match=message):
        train(run)
    looked = "'train.expert_parallel' is 2, but a step of one rank alone is looked at here; take it out to see the step"
    with pytest.raises(ConfigError, match=looked):
        observe_run(run, say=print)
    with pytest.raises(ConfigError, match=looked):
        trace_run(run, load_hardware("h100"), say=print)


@pytest.mark.parametrize(
    ("value", "message"),
    [("0", "must be at least 1, not 0"), ("[2]", "expected an integer for 'train.expert_parallel', not a list")],
)
def test_numbers_that_are_none(value: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(EXAMPLE.read_text().replace("expert_parallel: 2", f"expert_parallel: {value}"))
    with pytest.raises(ConfigError) as error:
        load_run(path)
    assert message in str(error.value)
