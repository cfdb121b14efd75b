"""`parallel.shard` in a run: four ranks, a checkpoint taken up by two, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from examples.train.trainer import train
from lowtide.cli.run_file import load_run
from lowtide.errors import ConfigError
from tests.support import trained, two_ranks

RUN = """\
model:
  model_type: qwen3
  hidden_size: 32
  intermediate_size: 48
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 8
  tie_word_embeddings: true
data: {sequence_length: 16, files: [text]}
train: {steps: 4, batch_size: 2, warmup_steps: 2, checkpoint_every: 2, device: cpu, learning_rate: 1e-2}
parallel: {shard: fsdp2, tensor: 2}
memory: {swap: ["*"], min_bytes: 1}
"""
BUDGET = 340_000
"""Of 357,192 bytes that a rank would need."""
GO = """
import dataclasses, os
from pathlib import Path
from examples.train.ranks import Ranks
from examples.train.trainer import train
from lowtide.cli.run_file import load_run
from tests.support.trained import weights_sha256

def refused(self, error, **how):  # else it would end the process, and the jobs that come after it
    os.environ["REFUSED"] = f"{type(error).__name__}: {error}"
    self.leave()
    raise SystemExit

Ranks.fail = refused
ports = iter(os.environ["MORE_PORTS"].split())

def go(name, memory="same", parallel={}, model={}, **keys):
    run = load_run("run.yaml")
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, **keys), output_dir=Path("runs") / name)
    run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **parallel))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, fields={**run.model.fields, **model}))
    if memory != "same":
        run = dataclasses.replace(run, memory=memory and dataclasses.replace(run.memory, swap=None, **memory))
    try:
        train(run)
        return weights_sha256(run.output_dir)
    except SystemExit:
        return os.environ["REFUSED"]
    finally:
        os.environ["MASTER_PORT"] = next(ports, "")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    (folder / "text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(2000)))
    (folder / "run.yaml").write_text(RUN)
    return folder


def told(code: str, folder: Path, num_ranks: int) -> Any:
    """What the first rank printed; all of them end well."""
    ends = two_ranks.finish(two_ranks.start(GO + textwrap.dedent(code), folder, num_ranks), folder, 240)
    assert [status for status, _, _ in ends] == [0] * num_ranks, ends
    found = [json.loads(out.splitlines()[-1]) for _, out, _ in ends]
    assert found == found[:1] * num_ranks
    return found[0]


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    four = told(
        """
        import json
        found = {"whole": go("whole")}
        found["budget"] = go("budget", memory={"budget": 340000, "recompute": "none"})
        found["uneven"] = go("uneven", parallel={"tensor": 4})
        found["three"] = go("three", parallel={"data": 3})
        print(json.dumps(found))
        """,
        folder,
        4,
    )
    two = told(
        """
        import json
        found = {"fsdp2 2": go("fsdp2 2", parallel={"tensor": None}, resume="runs/whole/checkpoints/step-00000002")}
        found["other"] = go("other", batch_size=8, resume="runs/whole/checkpoints/step-00000002")
        print(json.dumps(found))
        """,
        folder,
        2,
    )
    return four | two


@pytest.fixture(scope="module")
def more(answers: dict[str, Any], folder: Path) -> dict[str, Any]:
    four = told(
        """
        import json
        found = {"plain": go("plain", memory=None)}
        found["resumed"] = go("resumed", resume="runs/whole/checkpoints/step-00000002")
        found["hybrid"] = go("hybrid", parallel={"shard": "hsdp", "replicas": 2, "tensor": None}, batch_size=1)
        print(json.dumps(found))
        """,
        folder,
        4,
    )
    two = told(
        """
        import json
        print(json.dumps(go("tensor 2", batch_size=4, resume="runs/whole/checkpoints/step-00000002")))
        """,
        folder,
        2,
    )
    return answers | four | {"tensor 2": two}


def losses(folder: Path, name: str) -> list[float]:
    return trained.losses(folder / "runs" / name)


def test_it_learns_as_one_rank_does(answers: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding, since sums are in another order."""
    monkeypatch.chdir(folder)
    run = load_run("run.yaml")
    settings = dataclasses.replace(run.train, batch_size=4)
    alone = dataclasses.replace(run, train=settings, output_dir=Path("runs/alone"), memory=None, parallel=None)
    train(alone)
    expected = losses(folder, "alone")
    assert expected[-1] < expected[0] - 0.5
    assert losses(folder, "whole") == pytest.approx(expected, rel=1e-5)


@pytest.mark.extended
def test_replicas_of_shards_learn_so_too(more: dict[str, Any], folder: Path) -> None:
    assert losses(folder, "hybrid") == pytest.approx(losses(folder, "whole"), rel=1e-5)


@pytest.mark.extended
def test_rules_change_no_bit(more: dict[str, Any], folder: Path) -> None:
    assert more["whole"] == more["plain"]
    assert losses(folder, "whole") == losses(folder, "plain")


def test_memory_changes_no_bit(answers: dict[str, Any], folder: Path) -> None:
    """Rules, and a budget."""
    assert answers["whole"] == answers["budget"]
    assert losses(folder, "whole") == losses(folder, "budget")
    last = (folder / "runs/budget/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["plan"]["predicted_peak_bytes"] <= BUDGET
    assert json.loads(last)["tide"]["swapped_bytes"] + json.loads(last)["tide"]["recomputed_bytes"] > 0


@pytest.mark.extended  # experts resume in test_experts.py, pipelines in test_stages.py
def test_the_same_ranks_resume_to_the_bit(more: dict[str, Any], folder: Path) -> None:
    assert more["resumed"] == more["whole"]
    assert losses(folder, "resumed") == losses(folder, "whole")[2:]


def test_other_ranks_take_up_the_same_weights_and_state(answers: dict[str, Any], folder: Path) -> None:
    assert losses(folder, "fsdp2 2") == pytest.approx(losses(folder, "whole")[2:], rel=1e-4)


@pytest.mark.extended
def test_other_ranks_that_share_products_do_too(more: dict[str, Any], folder: Path) -> None:
    assert losses(folder, "tensor 2") == pytest.approx(losses(folder, "whole")[2:], rel=1e-4)


def test_what_is_refused(answers: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers["uneven"] == (
        "ConfigError: run.yaml:12:34: 'parallel.tensor' is 4, but 'model.num_key_value_heads' is 2, and a head is not "
        "cut; choose a divisor"
    )
    assert answers["three"] == (
        "ConfigError: run.yaml:12:19: 'parallel.shard' is fsdp2 and 'parallel.data' 3 and 'parallel.tensor' 2, but "
        "there are 4 ranks; start it with torchrun --nproc-per-node 6"
    )
    assert answers["other"] == (
        "ConfigError: runs/whole/checkpoints/step-00000002: made by a run with other settings: sequences of a step was "
        "4 and is now 8; put them back, or start a new run with another train.output_dir"
    )
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as error:
        train(load_run("run.yaml"))
    assert str(error.value) == (
        "run.yaml:12:19: 'parallel.shard' is fsdp2 and 'parallel.tensor' 2, but there is 1 rank; start it with "
        "torchrun --nproc-per-node 2, or a multiple of that"
    )
    for text, line in {
        "pipeline: {stages: 2, micro_batches: 2}": "'parallel.shard' cannot stand beside 'pipeline' yet; take one of "
        "them out",
        "recompute_config: {recompute: true}": "'parallel.shard' cannot stand beside recompute_config and swap_config "
        "yet; use the section 'memory'",
    }.items():
        (folder / "other.yaml").write_text(RUN.partition("memory:")[0] + text)
        with pytest.raises(ConfigError) as error:
            load_run(folder / "other.yaml")
        assert str(error.value).partition(": ")[2] == line
    (folder / "other.yaml").write_text(RUN.replace("batch_size: 2", "batch_size: 2, expert_parallel: 2"))
    with pytest.raises(ConfigError, match=r"cannot stand beside 'train\.expert_parallel' yet"):
        load_run(folder / "other.yaml")


def test_the_others_end_when_a_rank_is_killed(folder: Path) -> None:
    code = GO + textwrap.dedent(
        """
        import signal
        from examples.train.trainer import train
        Ranks.fail = original
        def on_step(record):
            if record["step"] == 2 and os.environ["RANK"] == "3":
                os.kill(os.getpid(), signal.SIGKILL)
        run = load_run("run.yaml")
        train(dataclasses.replace(run, output_dir=Path("runs/killed")), on_step=on_step)
        """
    )
    code = code.replace("Ranks.fail = refused", "original = Ranks.fail")
    ends = two_ranks.finish(two_ranks.start(code, folder, 4), folder, 120)
    assert [status for status, _, _ in ends] == [1, 1, 1, -9], ends
