"""Models that cannot be are refused in one line, in the file's words, before anything is traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.cli.main import main

LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
MODELS = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 4},
    "llama": LLAMA,
    "qwen3_moe": {**LLAMA, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **LLAMA, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 4,
    },
}  # fmt: skip
MAY_BE_0 = {"num_hidden_layers", "n_layer", "num_experts", "n_routed_experts"}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a tale of two cities\n" * 20)


def told(kind: str, fields: dict[str, int], capsys: pytest.CaptureFixture[str], *more: str) -> str:
    written = ", ".join(f"{key}: {value}" for key, value in fields.items())
    Path("run.yaml").write_text(
        f"model: {{model_type: {kind}, {written}}}\ndata: {{files: [text], sequence_length: 16}}\n"
        "train: {steps: 1, batch_size: 2, device: cpu}\n" + "parallel: {global_batch: 8}\n" * bool(more)
    )
    assert main(["plan", "run.yaml", "--budget", "64GiB", *more]) == 2, fields
    captured = capsys.readouterr()
    assert not captured.out
    lines = [line for line in captured.err.splitlines() if not line.startswith("lowtide: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("kind", MODELS)
def test_no_size_is_0_or_negative(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for key in MODELS[kind]:
        for value in (-1,) if key in MAY_BE_0 else (0, -1):
            line = told(kind, {**MODELS[kind], key: value}, capsys)
            assert line.startswith("run.yaml:1:") and "'model" in line


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("gpt2", {"n_head": 3}, "'model.n_head' is 3, which does not divide 'n_embd' of 16"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "'model.num_key_value_heads' is 3, which does not divide 'num_attention_heads' of 4",
        ),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 5},
            "'model.num_experts_per_tok' is 5, and there are 4 experts ('num_experts')",
        ),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 9},
            "'model.num_experts_per_tok' is 9, and there are 4 experts ('n_routed_experts')",
        ),
        ("deepseek_v3", {"n_group": 3}, "'model.n_group' is 3, which does not divide 'n_routed_experts' of 4"),
        ("deepseek_v3", {"topk_group": 3}, "'model.topk_group' is 3, and there are 2 groups ('n_group')"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--devices", "8", "--hardware", "h100")])
def test_the_parts_fit(
    kind: str, wrong: dict[str, int], message: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(kind, {**MODELS[kind], **wrong}, capsys, *more).partition(": ")[2] == message
