"""Ranks whose run files differ are told so by name; products that ranks share are exact or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import two_ranks

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PLAIN = {"steps": 2, "batch_size": 2, "device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"model": LLAMA, "train": PLAIN},
    "fsdp2": {"model": LLAMA, "train": PLAIN, "parallel": {"shard": "fsdp2"}},
    "experts": {"model": QWEN3_MOE, "train": PLAIN | {"expert_parallel": 2}},
    "pipeline": {"model": LLAMA, "train": PLAIN, "pipeline": {"stages": 2, "micro_batches": 2}},
    "tensor": {"model": LLAMA, "train": PLAIN, "parallel": {"shard": "fsdp2", "tensor": 2}},
}
OTHER = [
    ("ddp", "train", "learning_rate", 1e-3, 2e-3, "train.learning_rate"),
    ("ddp", "train", "clip_grad_norm", 1.0, 0.5, "train.clip_grad_norm"),
    ("ddp", "train", "steps", 2, 3, "train.steps"),
    ("fsdp2", "train", "seed", 0, 1, "train.seed"),
    ("fsdp2", "train", "precision", "float32", "bf16_autocast", "train.precision"),
    ("experts", "model", "seed", 0, 1, "model.seed"),
    ("experts", "train", "weight_decay", 0.1, 0.2, "train.weight_decay"),
    ("pipeline", "model", "rms_norm_eps", 1e-6, 1e-5, "model.rms_norm_eps"),
    ("pipeline", "pipeline", "schedule", "1f1b", "gpipe", "pipeline.schedule"),
    ("pipeline", "train", "warmup_steps", 0, 1, "train.warmup_steps"),
    ("tensor", "train", "batch_size", 2, 4, "train.batch_size"),
]
"""How they train, the section and key, what rank 0 and rank 1 have there, and the name in the message."""
APERTUS = LLAMA | {"model_type": "apertus", "hidden_act": "xielu"}
ON_BOTH = {
    "apertus": {**WAYS["tensor"], "model": APERTUS},
    "dropout": {**WAYS["tensor"], "model": LLAMA | {"attention_dropout": 0.1}},
    "llama": WAYS["tensor"],
}
GO = """
import json, os
from pathlib import Path
from examples.train.trainer import train
from examples.train.ranks import Ranks
from lowtide.cli.run_file import load_run

def refused(self, error, **how):  # else it would end the process, and the jobs that come after it
    self.leave()
    raise error

Ranks.fail = refused
rank, said = os.environ["RANK"], []
for number in range(NUM_JOBS):
    try:
        train(load_run(f"{number}-{rank}.yaml"))
        said.append("")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
print(json.dumps(said))
"""


def _write(name: str, sections: dict[str, Any], text: str = "text") -> None:
    train = sections["train"] | {"output_dir": f"runs/{name.partition('-')[0]}"}
    file = {"data": {"files": [text], "sequence_length": 16}, **sections, "train": train}
    Path(f"{name}.yaml").write_text("".join(f"{key}: {json.dumps(section)}\n" for key, section in file.items()))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What both ranks were told, of each job."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("text", "other"):
            Path(name).write_bytes(b"".join(b"%d bottles of %s\n" % (number, name.encode()) for number in range(99)))
        for number, (way, section, key, first, second, _) in enumerate(OTHER):
            for rank, value in enumerate((first, second)):
                sections = WAYS[way] | {section: WAYS[way][section] | {key: value}}
                _write(f"{number}-{rank}", sections)
        last = len(OTHER)
        for rank, (memory, text) in enumerate((({}, "text"), ({"memory": {"recompute": "all"}}, "other"))):
            _write(f"{last}-{rank}", WAYS["ddp"] | memory)
            _write(f"{last + 1}-{rank}", WAYS["ddp"], text)
            for number, sections in enumerate(ON_BOTH.values()):
                _write(f"{last + 2 + number}-{rank}", sections)
        code = GO.replace("NUM_JOBS", str(last + 2 + len(ON_BOTH)))
        return list(zip(*two_ranks.answers(code, folder), strict=True))


def test_run_files_that_differ_are_refused_by_name(said: list[tuple[str, str]]) -> None:
    for (_, _, _, first, second, name), both in zip(OTHER, said, strict=False):
        text = f"ConfigError: lowtide train: ranks have different {name}: rank 0 has {first}, rank 1 has {second}"
        assert both == (text, text)
    memory, files = said[len(OTHER) : len(OTHER) + 2]
    text = "ConfigError: lowtide train: ranks have different section memory: rank 0 has absent, rank 1 has written"
    assert memory == (text, text)
    assert files[0] == files[1]
    assert files[0].startswith("ConfigError: lowtide train: ranks have different data.files (sha256): rank 0 has ")


def test_products_that_ranks_share_are_exact_or_refused(said: list[tuple[str, str]]) -> None:
    apertus, dropout, llama = said[-3:]
    assert llama == ("", "")
    for rank in range(2):
        assert apertus[rank].endswith(
            "'parallel.tensor': a parameter is used on a part of a layer, and its gradients are parts; not covered, "
            "leave it out: 'model.layers.0.mlp.act_fn.alpha_p' differs between rank 0 and rank 1 of the ranks that "
            "share it"
        )
        assert dropout[rank].endswith(
            "'parallel.tensor' is 2, but 'model.layers.0.self_attn.attention_dropout' is 0.1: each rank would draw the "
            "same mask for its part; set it to 0"
        )
