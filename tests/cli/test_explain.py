"""`lowtide explain`: what a file means, as text and as JSON, with and without a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "mindformers"
UPSTREAM = """\
context:
  memory_optimize_level: "O0"
ENABLE_LAZY_INLINE_NO_PIPELINE: 1
model:
  model_config:
    type: LlamaConfig
    num_layers: 4
recompute_config:
  select_recompute:
    feed_forward: [0, 3]
swap_config:
  swap: True
  op_swap:
    - {op_name: attention, backward_prefetch: 20, layers: [0, 1, 2]}
    - {op_name: feed_forward, backward_prefetch: 15, layers: [1, 3]}
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(UPSTREAM)
    return "run.yaml"


def test_a_file_of_upstream(upstream: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", upstream]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15" in lines
    assert "note: have no meaning here: context.memory_optimize_level, ENABLE_LAZY_INLINE_NO_PIPELINE" in lines
    start = next(index for index, line in enumerate(lines) if line.startswith("layer  op"))
    assert lines[start:] == [
        "layer  op         fate               why",
        "0      mlp        recompute          recompute_config.select_recompute.feed_forward (run.yaml:10:19)",
        "0      self_attn  swap, prefetch 20  swap_config.op_swap[0] (run.yaml:14:7)",
        "1      self_attn  swap, prefetch 20  swap_config.op_swap[0] (run.yaml:14:7)",
        "1      mlp        swap, prefetch 15  swap_config.op_swap[1] (run.yaml:15:7)",
        "2      self_attn  swap, prefetch 20  swap_config.op_swap[0] (run.yaml:14:7)",
        "3      mlp        recompute          recompute_config.select_recompute.feed_forward (run.yaml:10:19)",
        "3      mlp        keep               not swapped: it is recomputed",
    ]


def test_flags_about_ranks_are_explained(upstream: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "{recompute: True, parallel_optimizer_comm_recompute: True, recompute_slice_activation: True}"
    Path(upstream).write_text(f"model: {{model_config: {{num_layers: 2}}}}\nrecompute_config: {flags}\n")
    assert main(["explain", upstream]) == 0
    out = capsys.readouterr().out
    assert "note: recompute_slice_activation: tensor-parallel ranks share the inputs of recomputed layers" in out
    said = "note: parallel_optimizer_comm_recompute: what FSDP2 shards in recomputed layers is"
    assert f"{said} gathered again in backward" in out
    Path(upstream).write_text(Path(upstream).read_text().replace("comm_recompute: True", "comm_recompute: False"))
    assert main(["explain", upstream]) == 0
    assert f"{said} kept whole from forward to backward" in capsys.readouterr().out


def test_nothing_heavy_is_imported(upstream: str) -> None:
    path = str(Path(upstream).resolve())
    code = f"import sys; from lowtide.cli.main import main; main(['explain', {path!r}]); print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES.parents[1], capture_output=True, text=True, timeout=200, check=True
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_numbers_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / "recompute.yaml")
    assert main(["explain", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_layers_per_stage"] == [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]
    assert document["log_lines"][2] == "Formative layer_recompute: [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]"
    assert [row["layer"] for row in document["rows"] if row["part"] == "<layer>"] == [0, 1, 4, 24]
    assert main(["explain", path, "--num-layers", "50", "--pp", "5", "--vpp", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"{path}:13:13: 'offset' must have 1 rows")


def test_what_the_command_line_says_is_named_by_its_option(upstream: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(upstream).write_text("recompute_config: {recompute: [1, 1]}\n")
    for options, said in (
        ([], "--num-layers: run.yaml does not say how many layers the model has; write --num-layers N"),
        (
            ["--num-layers", "7", "--pp", "2"],
            "--offset: 'offset' adds up to 0, but 7 layers on 2 stages of 1 chunk leave",
        ),
        (["--num-layers", "4", "--pp", "0"], "--pp: 'pipeline_stage' must be an integer of at least 1, not 0"),
        (["--num-layers", "4", "--offset", "[0, 1"], "--offset: must be an integer, a list such as '[0, 1]', or lists"),
        (["--num-layers", "4", "--offset", "[0, 1]"], "--offset: 'offset' has 2 numbers; write one for each of the 1"),
    ):
        assert main(["explain", upstream, *options]) == 2
        assert capsys.readouterr().err.startswith(said)
    assert main(["explain", upstream, "--num-layers", "7", "--pp", "2", "--offset", "[0, 1]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_layers_per_stage"] == [[3, 4]]


def test_names_without_a_model_are_those_of_the_documents(upstream: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(upstream).write_text("swap_config: {swap: True, default_prefetch: 10}\n")
    assert main(["explain", upstream, "--num-layers", "1"]) == 0
    assert "Set op_swap at layer 0: attention.flash_attention, value=10" in capsys.readouterr().out.splitlines()


def test_lists_beside_a_switch_that_is_off_are_said_to_do_nothing(
    upstream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    op = "{op_name: attention, backward_prefetch: 20, layers: True}"
    Path(upstream).write_text(f"swap_config: {{swap: False, op_swap: [{op}]}}\n")
    assert main(["explain", upstream, "--num-layers", "2"]) == 0
    said = "note: no effect: swap_config.op_swap, because swap_config.swap is false; write swap: true"
    assert said in capsys.readouterr().out.splitlines()


def test_mistakes_have_a_place(upstream: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(upstream).write_text(UPSTREAM.replace("[0, 1, 2]", "[0, 9]") + "compat: false\n")
    assert main(["explain", upstream]) == 2
    assert capsys.readouterr().err == (
        "run.yaml:14:63: 'swap_config.op_swap[0].layers[1]' names layer 9, but layers are 0 to 3; remove it\n"
    )
    Path(upstream).write_text(UPSTREAM.replace("[0, 1, 2]", "[0, 9]"))
    assert main(["explain", upstream]) == 0
    assert (
        "warning: run.yaml:14:63: 'swap_config.op_swap[0].layers[1]' names layer 9, but layers are 0 to 3; ignored"
        in capsys.readouterr().out.splitlines()
    )


def test_bytes_of_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(EXAMPLES / "swap_1_default.yaml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    output = 2 * 64 * 64 * 4  # batch, tokens, width, float32
    logsumexp = 2 * 4 * 64 * 4
    assert document["bytes_by_layer"] == [
        {"layer": index, "moved_bytes": output + logsumexp, "freed_bytes": 0} for index in range(4)
    ]
    assert {row["part"] for row in document["rows"]} == {"self_attn.sdpa"}
    assert document["log_lines"][-4:] == [
        f"Set op_swap at layer {index}: attention.flash_attention, value=10" for index in range(4)
    ]


def test_the_documented_grid_prints_the_documented_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(EXAMPLES / "recompute.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    every = "[[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]"
    # A level of a pattern ends with one backslash and a dot; Python shows a mapping's backslashes twice.
    assert lines[:7] == [
        f"num_layers per stage: {every}",
        "Accumulated num_layers per stage: [[4, 9, 14, 19, 24], [29, 34, 39, 44, 48]]",
        "Formative layer_recompute: [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]",
        rf"Formative select_recompute: {{'feed_forward\\.w1\\.activation\\.silu': {every}, "
        rf"'feed_forward\\.mul': {every}, "
        r"'feed_forward\\.w1\\.matmul': [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]], "
        r"'feed_forward\\.w3\\.matmul': [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]}",
        rf"Formative select_comm_recompute: {{'ffn_norm\\.norm': {every}, 'attention_norm\\.norm': {every}}}",
        "Formative select_recompute_exclude: {}",
        "Formative select_comm_recompute_exclude: {}",
    ]
    assert [line for line in lines if line.startswith("Set full")] == [
        f"Set full recompute at layer {index}" for index in (0, 1, 4, 24)
    ]
    assert "chunk 1, stage 4: 44-47" in [line.strip() for line in lines]
