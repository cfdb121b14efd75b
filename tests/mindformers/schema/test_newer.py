"""The newer schema: ranges of layers, expressions over whole paths, prefetch in layers; shipped blocks and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Resolution, Sections, read_sections
from lowtide.mindformers.schema.aliases import layer_tree

TREE = layer_tree("llama")
NUM_LAYERS = 8


def resolve(compat: bool = False, num_layers: int = NUM_LAYERS, **newer: Any) -> Resolution:
    return Sections(written=newer, num_layers=num_layers, compat=compat).resolve(names=TREE)


def by_layer(result: Resolution, name: str) -> dict[int, Any]:
    return {layer.index: getattr(layer, name) for layer in result.layers if getattr(layer, name)}


def test_layers_and_parts() -> None:
    result = resolve(
        recompute={
            "mode": "select",
            "full_recompute_layer": ["0-1", "7"],
            "select_module": {"mlp": ["1-3"], r"self_attn\.(q|k)_proj|self_attn": ["3"], ".*_proj": [5]},
            "exclude_op": {r"mlp\.down_proj": ["2", "5-6"]},
        },
        recompute_comm={"enable": True, "select_module": {r"self_attn\.o_proj": ["4"], "mlp": ["0"]}},
    )
    assert [layer.index for layer in result.layers if layer.full_recompute] == [0, 1, 7]
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj"]
    # What lies in a named part belongs to it; an excluded one does not.
    assert by_layer(result, "recompute_ops") == {2: ["mlp"], 3: ["mlp", "self_attn"], 5: projections}
    assert by_layer(result, "recompute_exclude_ops") == {index: ["mlp.down_proj"] for index in (2, 5, 6)}
    assert by_layer(result, "comm_recompute_ops") == {4: ["self_attn.o_proj"]}
    assert (result.warnings, result.log_lines) == ([], [])


def test_names_of_mindspore_on_a_hugging_face_model() -> None:
    select = {"mode": "select", "select_module": {"self_attention.core_attention": ["0"], r"mlp\.mul": ["1"]}}
    assert by_layer(resolve(recompute=select), "recompute_ops") == {0: ["self_attn.sdpa"], 1: ["mlp.mul"]}


def test_swap() -> None:
    result = resolve(
        recompute={"mode": "full", "full_recompute_layer": ["0"]},
        swap={
            "enable": True,
            "default_prefetch": 2,
            "layer_swap": [{"layers": ["0-1", "4"]}],
            "op_swap": [{"op_name": "self_attn", "layers": ["3-5"]}, {"op_name": "mlp.mul", "layers": ["3"]}],
        },
    )
    assert by_layer(result, "swap_ops") == {
        1: {"<layer>": 2},
        3: {"self_attn": 2, "mlp.mul": 2},
        4: {"<layer>": 2},
        5: {"self_attn": 2},
    }
    assert result.prefetch_unit == "layers"
    assert result.warnings == [
        "swap.layer_swap[0]: the layer is not swapped in layer 0: the whole layer is recomputed there"
    ]


SHIPPED = {
    "off, as version 1.9 writes it": ({"full_recompute": False, "select_recompute": False}, [], []),
    "four layers": ({"mode": "full", "full_recompute_layer": ["0-3"]}, [0, 1, 2, 3], []),
    "names from the model on": (
        {"mode": "select", "select_module": {"layers.*.self_attention.*": ["0-15"], "layers.*.mlp.*": ["0-9"]}},
        [],
        [
            f"recompute.select_module.layers.*.{name}.*: 'layers.*.{name}.*' names nothing in a layer; it does "
            "nothing; names start below the layer, and layers are chosen by number"
            for name in ("self_attention", "mlp")
        ],
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_blocks(name: str) -> None:
    section, full, warnings = SHIPPED[name]
    result = resolve(compat=True, num_layers=16, recompute=section)
    assert [layer.index for layer in result.layers if layer.full_recompute] == full
    assert result.warnings == warnings
    assert not by_layer(result, "recompute_ops")


FULL = "recompute.full_recompute_layer"
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "range": (
        {"recompute": {"mode": "full", "full_recompute_layer": ["0-x"]}},
        f"{FULL}[0]: must be a layer such as '5' or a range such as '0-3', not '0-x'",
    ),
    "number below 0": (
        {"recompute": {"mode": "full", "full_recompute_layer": ["-1"]}},
        f"{FULL}[0]: must be a layer such as '5' or a range such as '0-3', not '-1'",
    ),
    "backwards": (
        {"recompute": {"mode": "full", "full_recompute_layer": ["3-1"]}},
        f"{FULL}[0]: runs backwards; write '1-3'",
    ),
    "out of range": (
        {"recompute": {"mode": "full", "full_recompute_layer": ["0", "5-8"]}},
        f"{FULL}[1]: names layer 8, but layers are 0 to 7",
    ),
    "not ascending": (
        {"recompute": {"mode": "full", "full_recompute_layer": ["0-3", "3"]}},
        f"{FULL}[1]: starts at layer 3, but 3 is named before; write ranges in ascending order",
    ),
    "text": (
        {"recompute": {"mode": "full", "full_recompute_layer": "0-3"}},
        f"{FULL}: must be a list of layers such as ['0-3', '5'], not '0-3'",
    ),
    "nothing": (
        {"recompute": {"mode": "select"}},
        "recompute: has mode select but no select_module; write it, or mode: None",
    ),
    "mode": ({"recompute": {"mode": "all"}}, "recompute.mode: must be full, select or None, not 'all'"),
    "key": (
        {"recompute": {"mode": None, "select_modul": {}}},
        "recompute.select_modul: is not a known key; did you mean 'select_module'?",
    ),
    "version 1.9": (
        {"recompute": {"full_recompute": True}},
        "recompute.full_recompute: is how version 1.9 says it, which is not read; write mode: full or select",
    ),
    "expression": (
        {"recompute": {"mode": "select", "select_module": {"(mlp": ["0"]}}},
        "recompute.select_module.(mlp: is not a regular expression: missing ), unterminated subpattern: '(mlp'",
    ),
    "prefetch": (
        {"swap": {"enable": True, "default_prefetch": 8}},
        "swap.default_prefetch: must be a number of layers, 1 to 7, not 8",
    ),
    "prefetch past the end": (
        {"swap": {"enable": True, "default_prefetch": 2, "layer_swap": [{"layers": ["0-6"]}]}},
        "swap.layer_swap[0].layers: names layer 6, which would be fetched when backward reaches layer 8, but layers "
        "are 0 to 7; name layers up to 5",
    ),
    "no layers": (
        {"swap": {"enable": True, "op_swap": [{"op_name": "mlp"}]}},
        "swap.op_swap[0]: has no layers; write a list such as ['0-3']",
    ),
    "no name": (
        {"swap": {"enable": True, "op_swap": [{"layers": ["0"]}]}},
        "swap.op_swap[0].op_name: must be a name, not None",
    ),
    "switch": ({"swap": {"enable": 1}}, "swap.enable: must be true or false, not 1"),
    "comm": (
        {"recompute_comm": {"enable": True}},
        "recompute_comm: is enabled but has no select_module; write it, or enable: false",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    newer, message = MISTAKES[name]
    for compat in (True, False):
        with pytest.raises(ConfigError) as caught:
            resolve(compat=compat, **newer)
        assert str(caught.value) == message


TOLERATED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unmatched": (
        {"recompute": {"mode": "select", "select_module": {"mpl": ["0"]}}},
        "recompute.select_module.mpl: 'mpl' names nothing in a layer",
        "it does nothing; nearest: 'mlp'",
        "nearest: 'mlp'",
    ),
    "second entry": (
        {"swap": {"enable": True, "layer_swap": [{"layers": ["0"]}, {"layers": ["1"]}]}},
        "swap.layer_swap[1]: is not the first entry, and upstream reads no other",
        "ignored",
        "write all layers into the first entry",
    ),
    "second name": (
        {"swap": {"enable": True, "op_swap": [{"op_name": "mlp", "layers": [at]} for at in ("0", "1")]}},
        "swap.op_swap[1]: names 'mlp' a second time, of which upstream reads the last only",
        "read so",
        "write all its layers into one entry",
    ),
    "prefetch of an entry": (
        {"swap": {"enable": True, "layer_swap": [{"layers": ["0"], "backward_prefetch": 3}]}},
        "swap.layer_swap[0].backward_prefetch: is not read in the newer schema",
        "ignored",
        "remove it; default_prefetch is for all",
    ),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_what_upstream_leaves_out(name: str) -> None:
    newer, problem, meaning, fix = TOLERATED[name]
    assert resolve(compat=True, **newer).warnings[0].startswith(f"{problem}; {meaning}")
    with pytest.raises(ConfigError) as caught:
        resolve(**newer)
    assert str(caught.value).startswith(f"{problem}; {fix}")


def test_what_has_no_effect_is_said() -> None:
    off = {"mode": "None", "select_module": {"mlp": ["0"]}, "use_reentrant": False}
    result = resolve(recompute=off, swap={"enable": False, "layer_swap": [{"layers": ["0"]}]})
    assert result.notes == [
        "no effect: swap.layer_swap, because swap.enable is not true",
        "no effect: recompute.select_module, because recompute.mode is None",
        "no effect: recompute.use_reentrant, because lowtide runs layers again in a way of its own",
    ]
    assert resolve(swap={"enable": True}).notes == [
        "swap: it is enabled, but layer_swap and op_swap are empty, so nothing is swapped"
    ]


FILE = """\
model: {model_type: deepseek_v3, num_hidden_layers: 6}
parallelism: {pipeline_parallel: 1}
recompute: {mode: full, full_recompute_layer: ['0-3']}
"""


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)
    result = read_sections("run.yaml").resolve()
    assert [layer.full_recompute for layer in result.layers] == [True] * 4 + [False] * 2
    assert result.layers[0].why == {"<layer>": "recompute.full_recompute_layer (run.yaml:3:47)"}
    assert result.notes == ["have no meaning here: parallelism"]
    Path("run.yaml").write_text(FILE.replace("'0-3'", "'0-9'"))
    with pytest.raises(ConfigError) as caught:
        read_sections("run.yaml").resolve()
    assert str(caught.value) == (
        "run.yaml:3:48: 'recompute.full_recompute_layer[0]' names layer 9, but layers are 0 to 5"
    )
    Path("run.yaml").write_text(FILE + "swap_config: {swap: True}\n")
    with pytest.raises(ConfigError) as caught:
        read_sections("run.yaml").resolve()
    assert str(caught.value) == (
        "run.yaml:3:1: 'recompute' belongs to the newer schema of MindSpore Transformers, and 'swap_config' to the "
        "older; write one of them"
    )
