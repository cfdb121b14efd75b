"""Pairs that overlap, experts and products over ranks, a split sequence, recompute, swap and a swapped optimizer in one
run on four ranks: the losses of one process, and what cannot stand together."""

from __future__ import annotations

from typing import Any

import pytest

from examples.train.trainer import train
from lowtide.cli.run_file import load_run
from tests.examples.train.test_stages import DEEPSEEK, DUALPIPEV, in_folder, on_ranks, refusal, write
from tests.support.trained import steps_of

__all__ = ["in_folder"]

ALL = {"pipeline": DUALPIPEV | {"overlap": True}}
SECTIONS = {
    "recompute_config": {"recompute": [0, 2], "select_recompute": {r"feed_forward\.shared_experts\.mul": [1, 3]}},
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention.flash_attention", "backward_prefetch": 2, "layers": True}],
    },
}


def test_the_whole_command_line_has_the_losses_of_one_process() -> None:
    how: dict[str, Any] = {"clip_grad_norm": 0.5}
    write("alone", grad_accumulation=4, model=DEEPSEEK, **how)
    train(load_run("alone.yaml"))
    how |= {"tensor_parallel": 2, "expert_parallel": 2, "engine": "host"}
    memory = {"optimizer": "swap", "min_bytes": 0}
    # The second half has rules of ours in place of the files'.
    write("files", model=DEEPSEEK, sections=ALL | SECTIONS | {"memory": memory}, output_dir="both", steps=2, **how)
    rules = memory | {"recompute": ["layers.0.self_attn"], "swap": ["layers.*"], "loss": "sliced"}
    write("rules", model=DEEPSEEK, sections=ALL | {"memory": rules}, output_dir="both", **how)
    code = """
    import os
    for name, port in zip(("files", "rules"), os.environ["MORE_PORTS"].split()):
        train(load_run(f"{name}.yaml"))
        os.environ["MASTER_PORT"] = port
    """
    ends = on_ranks(code, 4)
    assert [status for status, _, _ in ends] == [0] * 4, "".join(err for _, _, err in ends)
    for step, wanted in zip(steps_of("both"), steps_of("alone"), strict=True):
        # To the rounding of sums in another order.
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert step["tokens_per_second"] > 0
        assert step["tide"]["recomputed_bytes"] > 0
        assert step["tide"]["swapped_bytes"] > 0
    assert "on 4 ranks (2 in stage, 2 in product), stages of 1, 1, 1, 1 layers" in ends[0][2]


def test_what_cannot_stand_together_is_refused_by_name() -> None:
    pipeline: dict[str, Any] = {"sections": {"pipeline": DUALPIPEV}}
    assert refusal(tensor_parallel=2) == (
        "run.yaml:3:117: 'train.tensor_parallel' is for the stages of a section 'pipeline'; without one write "
        "parallel: {shard: fsdp2, tensor: ...}"
    )
    assert refusal(tensor_parallel=3, **pipeline) == (
        "run.yaml:3:117: 'train.tensor_parallel' is 3, and 'data.sequence_length' 16 does not divide by it; each rank "
        "has a part of the tokens, so choose a divisor"
    )
    assert refusal(tensor_parallel=2, expert_parallel=3, model=DEEPSEEK, **pipeline) == (
        "run.yaml:3:117: 'train.tensor_parallel' is 2, and 'train.expert_parallel' 3 does not divide by it; each rank "
        "has a part of the tokens, so choose a divisor"
    )
    assert refusal(tensor_parallel=2, **pipeline) == (
        "run.yaml:4:47: 'pipeline.stages' is 2 and 'train.tensor_parallel' 2, but there is 1 rank; start it with "
        "torchrun --nproc-per-node 4"
    )
    assert refusal(sections={"pipeline": DUALPIPEV, "parallel": {"shard": "fsdp2"}}) == (
        "run.yaml:5:21: 'parallel.shard' cannot stand beside 'pipeline' yet; take one of them out"
    )
