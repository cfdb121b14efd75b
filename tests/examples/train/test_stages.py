"""`lowtide train` as a pipeline on two real ranks: the losses of one rank to the bit, checkpoints, and clear ends."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from examples.train.trainer import train
from lowtide.cli.run_file import load_run
from lowtide.cli.run_step import trace_run
from lowtide.errors import ConfigError
from lowtide.timeline.hardware import load_hardware
from tests.support import processes, two_ranks
from tests.support.trained import losses, steps_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
DUALPIPEV = {"schedule": "dualpipev", "stages": 2, "micro_batches": 4}
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(200)))


def write(name: str, *, model: dict[str, Any] = LLAMA, sections: dict[str, Any] | None = None, **keys: object) -> None:
    """`name`.yaml in the current folder."""
    settings = {"steps": NUM_STEPS, "batch_size": 2, "device": "cpu", "warmup_steps": 2, "clip_grad_norm": None, **keys}
    settings.setdefault("output_dir", name)
    file = {"model": model, "data": {"files": ["text"], "sequence_length": 16}, "train": settings, **(sections or {})}
    Path(f"{name}.yaml").write_text("".join(f"{key}: {json.dumps(section)}\n" for key, section in file.items()))


def on_ranks(code: str, num_ranks: int = 2) -> list[processes.End]:
    head = "from lowtide.cli.run_file import load_run\nfrom examples.train.trainer import train\n"
    return two_ranks.finish(two_ranks.start(head + textwrap.dedent(code), Path.cwd(), num_ranks), Path.cwd())


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one() -> None:
    # Dividing by 4 rounds nothing, so the losses of one rank, which divides first, are comparable to the bit.
    write("alone", grad_accumulation=4)
    train(load_run("alone.yaml"))
    write("bf16", grad_accumulation=4, precision="bf16_autocast")
    train(load_run("bf16.yaml"))
    write("clipped", grad_accumulation=4, clip_grad_norm=0.5)
    train(load_run("clipped.yaml"))
    write("deepseek", grad_accumulation=4, model=DEEPSEEK)
    train(load_run("deepseek.yaml"))
    recompute = {"recompute": "all", "min_bytes": 0, "loss": "sliced"}
    write("pipe_alone", sections={"pipeline": DUALPIPEV, "memory": recompute})
    write("pipe_bf16", sections={"pipeline": DUALPIPEV | {"schedule": "zb_v"}}, precision="bf16_autocast")
    write("pipe_clipped", sections={"pipeline": DUALPIPEV | {"schedule": "1f1b"}}, clip_grad_norm=0.5)
    write("pipe_deepseek", sections={"pipeline": DUALPIPEV, "memory": recompute}, model=DEEPSEEK)
    write("pipe_half", sections={"pipeline": DUALPIPEV}, output_dir="resumed", steps=2)
    write("pipe_rest", sections={"pipeline": DUALPIPEV}, output_dir="resumed")
    code = """
    import os
    names = ("alone", "bf16", "clipped", "deepseek", "half", "rest")
    for name, port in zip(names, os.environ["MORE_PORTS"].split()):
        train(load_run(f"pipe_{name}.yaml"))
        os.environ["MASTER_PORT"] = port
    """
    first, second = on_ranks(code)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    for name in ("alone", "bf16", "deepseek", "clipped"):
        assert losses(f"pipe_{name}") == losses(name)
    assert losses("resumed") == losses("alone")
    norms = [[step["grad_norm"] for step in steps_of(name)] for name in ("pipe_clipped", "clipped")]
    assert norms[0] == norms[1]
    assert all(step["tide"]["recomputed_bytes"] > 0 for step in steps_of("pipe_alone"))
    assert "on 2 ranks" in first[2]
    assert "resumed from resumed/checkpoints/step-00000002" in first[2]


def test_a_budget_changes_no_loss_and_holds_on_every_rank() -> None:
    write("alone", grad_accumulation=4)
    train(load_run("alone.yaml"))
    memory = {"budget": "430KB", "min_bytes": 0, "recompute": "none"}  # which takes half the time to plan
    sections = {"pipeline": DUALPIPEV, "memory": memory}
    write("half", sections=sections, output_dir="resumed", steps=2, engine="host")
    write("rest", sections=sections, output_dir="resumed", engine="host")
    small = DUALPIPEV | {"schedule": "1f1b"}
    table = {"recompute": [[1, 0], [0, 1]], "select_recompute": {r"feed_forward\.mul": [[0, 1], [1, 0]]}}
    write("file", sections={"pipeline": DUALPIPEV, "recompute_config": table})
    state = {"optimizer": "swap", "recompute": ["layers.0"], "min_bytes": 0}
    write("state", sections={"pipeline": small | {"layers": [3, 1]}, "memory": state}, engine="host")
    write("small", sections={"pipeline": small, "memory": memory | {"budget": "100KB"}})
    code = """
    import os
    for name, port in zip(("half", "rest", "file", "state", "small"), os.environ["MORE_PORTS"].split()):
        train(load_run(f"{name}.yaml"))
        os.environ["MASTER_PORT"] = port
    """
    first, second = on_ranks(code)
    assert (first[0], second[0]) == (2, 2), first[2] + second[2]
    for name in ("resumed", "file", "state"):
        assert losses(name) == losses("alone")
    # By the file layers 0 and 2 run again as a whole: the row that comes back is written by stage. Rank 1 is silent.
    assert ["Set full recompute at layer 0" in first[2], "Set full recompute at layer 3" in first[2]] == [True, False]
    for step in steps_of("resumed"):
        assert step["tide"]["recomputed_bytes"] + step["tide"]["swapped_bytes"] > 0
        assert step["peak_bytes"] <= step["plan"]["predicted_peak_bytes"] <= 430_000
    said = first[2].splitlines()
    assert [line.partition(": plan")[0] for line in said if line.startswith("lowtide: rank ")][:4] == [
        f"lowtide: rank {rank}, stage {stage}" for stage, rank in enumerate((0, 1, 1, 0))
    ]
    both = first[2] + second[2]
    assert both.count("no plan fits the budget of 0.095 MiB: of the micro-batches stage ") == 1


@pytest.mark.slow
def test_a_stage_that_fails_ends_both_ranks_with_one_message() -> None:
    write("run", sections={"pipeline": DUALPIPEV})
    code = """
    import os
    from examples.train.stages import RankStages
    begin = RankStages.begin
    def begin_badly(self, *args):
        begin(self, *args)
        def fail(*_):
            raise RuntimeError("the dog ate the batch")
        if os.environ["RANK"] == "1":
            self.model[0].register_forward_pre_hook(fail)
    RankStages.begin = begin_badly
    train(load_run("run.yaml"))
    """
    (status_0, _, err_0), (status_1, _, err_1) = on_ranks(code)
    assert status_0 not in (0, None)
    assert status_1 not in (0, None)
    assert (err_0 + err_1).count("lowtide: rank 1 failed at step 1: ") == 1
    assert err_1.rstrip().endswith("lowtide: rank 1 failed at step 1: RuntimeError: the dog ate the batch")
    assert "lowtide: rank 1 failed at 1F0 of step 1" in err_1


def refusal(**more: Any) -> str:
    write("run", **more)
    with pytest.raises(ConfigError) as caught:
        train(load_run("run.yaml"))
    return str(caught.value)


def test_what_is_refused_with_its_place() -> None:
    def beside(memory: dict[str, Any]) -> str:
        return refusal(sections={"pipeline": DUALPIPEV, "memory": memory})

    assert refusal(sections={"pipeline": DUALPIPEV | {"micro_batches": 3}}) == (
        "run.yaml:4:11: pipeline: 'dualpipev' on 2 ranks needs at least 4 micro-batches (2 x ranks), not 3"
    )
    assert refusal(sections={"pipeline": DUALPIPEV | {"schedule": "dualpipe"}}) == (
        "run.yaml:4:24: expected gpipe, 1f1b, interleaved, interleaved_overlap, zb_v, dualpipev or "
        "one_stage_overlap for 'pipeline.schedule', not 'dualpipe'; did you mean 'dualpipev'?"
    )
    assert refusal(sections={"pipeline": DUALPIPEV}) == (
        "run.yaml:4:47: 'pipeline.stages' is 2, but there is 1 rank; start it with torchrun --nproc-per-node 2"
    )
    assert refusal(sections={"pipeline": DUALPIPEV}, model=DEEPSEEK, expert_parallel=2) == (
        "run.yaml:4:47: 'pipeline.stages' is 2 and 'train.expert_parallel' 2, but there is 1 rank; start it with "
        "torchrun --nproc-per-node 4"
    )
    assert refusal(sections={"pipeline": DUALPIPEV | {"schedule": "zb_v", "overlap": True}}) == (
        "run.yaml:4:76: 'pipeline.overlap' is about pairs of a forward and a backward, which 'zb_v' does not have; "
        "choose dualpipev, interleaved_overlap or one_stage_overlap"
    )
    assert refusal(sections={"pipeline": DUALPIPEV}, grad_accumulation=2) == (
        "run.yaml:3:119: 'train.grad_accumulation' is 2, and a step of a pipeline has 4 micro-batches already; write "
        "their number into 'pipeline.micro_batches' only"
    )
    assert beside({"budget": "1GiB", "loss": "sliced"}) == (
        "run.yaml:5:36: 'memory.loss' cannot be sliced beside 'pipeline', where the loss is no part of a model"
    )


def test_files_that_were_written_for_another_pipeline_are_refused_with_their_place() -> None:
    one: dict[str, Any] = {"pipeline": DUALPIPEV | {"stages": 1}, "recompute_config": {"recompute": True}}
    assert refusal(sections=one | {"parallel_config": {"pipeline_stage": 4}}) == (
        "run.yaml:6:37: 'pipeline_stage' is 4, but the section 'pipeline' and the model make it 1; take it out"
    )
    scheduler = {"parallel": {"pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}}}
    assert refusal(sections=one | {"pipeline": DUALPIPEV | {"schedule": "1f1b", "stages": 1}} | scheduler) == (
        "run.yaml:4:24: 'pipeline.schedule' is '1f1b', but the file says pipeline_scheduler: zero_bubble_v, whose "
        "second chunk comes back; choose zb_v or dualpipev, or take pipeline_scheduler out"
    )
    table = {"recompute_config": {"recompute": [1, 2]}}
    assert "run.yaml:5:33: 'recompute_config.recompute' " in refusal(sections=one | table)


def test_models_that_cannot_be_split_are_refused_with_their_place() -> None:
    one = {"pipeline": {"schedule": "dualpipev", "stages": 1, "micro_batches": 4}}
    assert refusal(sections=one, model=LLAMA | {"num_hidden_layers": 3}) == (
        "run.yaml:4:11: pipeline: 3 layers do not split evenly over 2 stages; use a model of 2 or 4 layers, or a "
        "number of stages that divides 3; or write 'pipeline.layers: balanced'"
    )
    assert refusal(sections={"pipeline": DUALPIPEV | {"stages": 1, "layers": [2, 1]}}) == (
        "run.yaml:4:80: 'pipeline.layers' has 2 numbers that add up to 3; 'dualpipev' has 2 stages here, and the model "
        "4 layers"
    )
    assert refusal(sections={"pipeline": DUALPIPEV | {"stages": 1, "layers": [4, 0]}}) == (
        "run.yaml:4:80: 'pipeline.layers' must be one number of layers for each stage, each at least 1"
    )
    assert refusal(sections=one, model=LLAMA | {"model_type": "mistral"}) == (
        "run.yaml:4:11: pipeline: a model of kind 'mistral' cannot be cut into stages; known are llama, qwen3_moe, "
        "deepseek_v3. Give Pipeline stages of your own"
    )


def test_a_plan_for_one_rank_is_refused() -> None:
    write("run", sections={"pipeline": DUALPIPEV})
    with pytest.raises(ConfigError) as caught:
        trace_run(load_run("run.yaml"), load_hardware("cpu"), say=print)
    assert str(caught.value) == (
        "run.yaml:4:11: 'pipeline': a step of the whole model is looked at here; take the section out to see it"
    )


def test_one_rank_is_a_pipeline_too() -> None:
    write("alone", grad_accumulation=4)
    train(load_run("alone.yaml"))
    write("pipe", sections={"pipeline": DUALPIPEV | {"stages": 1}})
    train(load_run("pipe.yaml"))
    assert losses("pipe") == losses("alone")


def test_layers_are_dealt_by_their_time_and_so_again_when_a_run_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    """The head of a large vocabulary takes as long as some layers."""
    model = LLAMA | {"vocab_size": 8192}
    balanced = {"pipeline": DUALPIPEV | {"stages": 1, "layers": "balanced"}}
    write("alone", model=model, grad_accumulation=4)
    train(load_run("alone.yaml"))
    for steps in (2, NUM_STEPS):
        write("run", model=model, sections=balanced, steps=steps)
        train(load_run("run.yaml"))
    assert losses("run") == losses("alone")
    assert capsys.readouterr().err.count(", stages of 3, 1 layers") == 2
    write("run", model=model, sections={"pipeline": DUALPIPEV | {"stages": 1}}, steps=NUM_STEPS + 1)
    with pytest.raises(ConfigError, match=re.escape("layers of stages was [3, 1] and is now [2, 2]; put them back")):
        train(load_run("run.yaml"))
