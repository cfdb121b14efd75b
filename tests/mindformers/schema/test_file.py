"""The two sections in a YAML file: places in messages, where the numbers come from, keys that mean nothing here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.mindformers.schema import read_sections

UPSTREAM = """
context:
  memory_optimize_level: "O0"
runner_config: {epochs: 2}
ENABLE_LAZY_INLINE_NO_PIPELINE: 1
parallel:
  pipeline_config: {pipeline_interleave: True}
parallel_config: {pipeline_stage: 2}
model:
  model_config: {num_layers: 7, mtp_depth: 1, offset: 0, pp_interleave_num: 2}
recompute_config:
  recompute: [2, 1]
  select_recompute:
    feed_forward\\.mul: True
    'feed_forward\\.w1\\.activation\\.silu': [1, off]
  mp_comm_recompute: True
"""


def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text.lstrip("\n"), encoding="utf-8")
    return "run.yaml"


def test_a_file_of_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = read_sections(write(tmp_path, monkeypatch, UPSTREAM)).resolve()
    assert result.num_layers_per_stage == [[2, 2], [2, 2]]
    assert result.normalized["layer_recompute"] == [[1, 1], [1, 0]]
    assert result.normalized["select_recompute"] == {
        "feed_forward\\.mul": [[2, 2], [2, 2]],
        "feed_forward\\.w1\\.activation\\.silu": [[1, 0], [0, 0]],
    }
    assert result.warnings == []
    assert result.notes == [
        "have no meaning here: context.memory_optimize_level, runner_config, ENABLE_LAZY_INLINE_NO_PIPELINE"
    ]


def test_arguments_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, monkeypatch, UPSTREAM)
    sections = replace(read_sections(path), pipeline_stage=3, pp_interleave_num=1, offset=[1, 0, -1])
    result = sections.resolve(num_layers=6)
    assert result.num_layers_per_stage == [[3, 2, 1]]


def test_chunks_count_only_with_interleaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = read_sections(
        write(tmp_path, monkeypatch, UPSTREAM.replace("pipeline_interleave: True", "a: 1"))
    ).resolve()
    assert result.num_layers_per_stage == [[4, 4]]
    assert result.notes[1] == (
        "no effect: pp_interleave_num, because parallel.pipeline_config.pipeline_interleave is not true"
    )


def test_a_run_file_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model: {model_type: llama, num_hidden_layers: 2}\nswap_config: {swap: true}\nmemory: {}\n"
    result = read_sections(write(tmp_path, monkeypatch, text)).resolve(names={"self_attn": {"q_proj": {}}})
    assert [layer.swap_ops for layer in result.layers] == [{"self_attn.sdpa": 1}] * 2
    assert result.notes == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {num_layers: 4}\nrecompute_config:\n  recompute: [2, -1]\nparallel_config: {pipeline_stage: 2}\n",
            "run.yaml:3:18: 'recompute_config.recompute[1]' asks for -1 layers; write 0 or more",
        ),
        (
            "model: {num_layers: 4}\nrecompute_config:\n  recompute: (1, 2)\n",
            "run.yaml:3:14: 'recompute_config.recompute' must be true, false, a count per stage such as [2, 1], or "
            "counts [chunk][stage] such as [[2, 1], [1, 0]], not '(1, 2)'; a tuple cannot be written in YAML, use [ ]",
        ),
        (
            "model: {num_layers: 4}\nswap_config:\n  swap: true\n  layer_swap:\n    - {layers: [0], "
            "backward_prefetch: soon}\n",
            "run.yaml:5:40: 'swap_config.layer_swap[0].backward_prefetch' must be a number of operators, 1 or more, "
            "not 'soon'",
        ),
        (
            "model: {num_layers: 4}\nrecompute_config:\n  recomput: true\n",
            "run.yaml:3:13: 'recompute_config.recomput' is not a known key; did you mean 'recompute'?",
        ),
        (
            "model: {num_layers: 4}\nrecompute_confg:\n  recompute: true\n",
            "run.yaml:2:1: unknown section 'recompute_confg'; did you mean 'recompute_config'?",
        ),
        (
            "model: {num_layers: 4}\n",
            "run.yaml:1:1: missing section 'recompute_config' or 'swap_config'; write one of them, or use lowtide "
            "plan for a section 'memory'",
        ),
        (
            "recompute_config: {recompute: true}\n",
            "run.yaml: the file does not say how many layers the model has; pass num_layers",
        ),
    ],
)
def test_errors_have_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    path = write(tmp_path, monkeypatch, text)
    with pytest.raises(ConfigError) as caught:
        replace(read_sections(path), compat=False).resolve()
    assert str(caught.value) == message


WRONG = "swap_config: {swap: true, layer_swap: [{backward_prefetch: 1, layers: [9]}]}\n"


@pytest.mark.parametrize(
    ("around", "is_strict"),
    [
        ("model: {num_layers: 4}\n", False),
        ("model: {model_config: {type: LlamaConfig, num_layers: 4}}\n", False),
        ("model: {num_layers: 4}\ncompat: false\n", True),
        ("model: {model_type: llama, num_hidden_layers: 4}\n", True),
        ("model: {num_layers: 4}\ntrain: {steps: 1}\n", True),
        ("model: {model_type: llama, num_hidden_layers: 4}\ncompat: true\n", False),
    ],
)
def test_files_of_ours_are_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: str, *, is_strict: bool
) -> None:
    path = write(tmp_path, monkeypatch, WRONG + around)
    problem = "run.yaml:1:72: 'swap_config.layer_swap[0].layers[0]' names layer 9, but layers are 0 to 3"
    if not is_strict:
        assert read_sections(path).resolve().warnings == [f"{problem}; ignored"]
        return
    with pytest.raises(ConfigError) as caught:
        read_sections(path).resolve()
    assert str(caught.value) == f"{problem}; remove it"


def test_a_mistake_in_the_grid_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, monkeypatch, UPSTREAM.replace("offset: 0", "offset: [0, 1, 1]"))
    with pytest.raises(ConfigError) as caught:
        read_sections(path).resolve()
    assert str(caught.value) == "run.yaml:9:55: 'offset' has 3 numbers; write one for each of the 2 stages"


def test_the_sections_wait_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.mindformers.schema import read_sections

    sections = read_sections(write(tmp_path, monkeypatch, UPSTREAM))
    assert (sections.num_layers, sections.num_extra_layers, sections.compat) == (7, 1, True)
    assert len(sections.resolve().layers) == 8
    assert len(replace(sections, pipeline_stage=2, pp_interleave_num=2).resolve(num_layers=4).layers) == 4
