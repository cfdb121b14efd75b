"""`recompute_config` and `swap_config` on a small Llama: the same bits on an adversarial engine, bytes that move."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.log import Listener
from lowtide.errors import ConfigError
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual

NUM_LAYERS = 4
WIDTH, INNER, TOKENS = 32, 64, 16
ROW = 2 * TOKENS * WIDTH * 4
INNER_ROW = 2 * TOKENS * INNER * 4

Config = dict[str, Any]


def op_swap(*entries: tuple[str, int, Any]) -> Config:
    listed = [{"op_name": name, "backward_prefetch": prefetch, "layers": layers} for name, prefetch, layers in entries]
    return {"swap": True, "op_swap": listed}


CONFIGS: dict[str, Config] = {
    "layers": {"recompute_config": {"recompute": [2]}},
    "all layers": {"recompute_config": {"recompute": True}},
    "default ops": {"recompute_config": {"select_recompute": True}},
    "ops by name": {
        "recompute_config": {"select_recompute": {r"feed_forward\.mul": [3], r"attention_norm\.norm": True}}
    },
    "modules": {"recompute_config": {"select_recompute": ["feed_forward"]}},
    "layers and ops": {"recompute_config": {"recompute": [1], "select_recompute": [4]}},
    "all but one op": {"recompute_config": {"recompute": True, "select_recompute_exclude": [r"feed_forward\.mul"]}},
    "swap by default": {"swap_config": {"swap": True, "default_prefetch": 10}},
    "swap layers": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [0, 3]}]}},
    "swap ops": {
        "swap_config": op_swap(("attention", 20, [0, 1, 2]), ("attention", 10, [3]), ("feed_forward", 15, [1]))
    },
    "both": {
        "swap_config": op_swap(("attention", 20, True), ("feed_forward", 15, [1, 2])),
        "recompute_config": {"select_recompute": {"feed_forward": [0, 3]}},
    },
    "recomputed between swapped": {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": True}]},
        "recompute_config": {"recompute": [1], "select_recompute": {r"feed_forward\.mul": [2]}},
    },
    "a reader is recomputed": {
        "swap_config": op_swap((r"feed_forward\.w1", 5, [0, 1])),
        "recompute_config": {"select_recompute": {r"feed_forward\.mul": [0]}},
    },
}


def build() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def step(model: torch.nn.Module, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (2, TOKENS), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return loss.detach(), gradients


@functools.cache
def plain_steps() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    model = build()
    return [step(model, seed) for seed in range(3)]


@pytest.mark.parametrize("name", one_of(4, CONFIGS))
def test_the_same_bits(name: str) -> None:
    model = build()
    with lowtide.apply(model, CONFIGS[name], engine=virtual(7)) as tide:
        for seed, (loss, gradients) in enumerate(plain_steps()):
            got_loss, got = step(model, seed)
            assert torch.equal(got_loss, loss)
            assert all(torch.equal(a, b) for a, b in zip(got, gradients, strict=True))
        stats = tide.stats
        freed = sum(row.nbytes for row in tide.source.file_plan.rows if row.fate == "recompute")
        freed += sum(site.nbytes for site in tide.plan.sites if site.retained_input and site.fate is Fate.RECOMPUTE)
        moved = sum(row.nbytes for row in tide.source.file_plan.rows if row.fate == "swap")
        assert (stats.recomputed_bytes, stats.swapped_bytes) == (3 * freed, 3 * moved)
        assert stats.num_divergences == 0
        positions = 2 * TOKENS * 8 // 2  # an input of recomputed layers that plain autograd does not save
        assert sum(tide.tide._context.unknown_site_bytes.values()) in (0, positions)
        assert stats.kept_bytes + stats.recomputed_bytes + stats.swapped_bytes > 0


NEWER: dict[str, Config] = {
    "full": {"recompute": {"mode": "full", "full_recompute_layer": ["0-1", "3"]}},
    "select": {
        "recompute": {
            "mode": "select",
            "full_recompute_layer": ["2"],
            "select_module": {r"mlp\.(act_fn|mul)": ["0-1"], "input_layernorm": ["3"]},
            "exclude_op": {r"mlp\.act_fn": ["1"]},
        }
    },
    "both": {
        "recompute": {"mode": "select", "select_module": {"mlp": ["1"]}},
        "swap": {
            "enable": True,
            "default_prefetch": 1,
            "layer_swap": [{"layers": ["0"]}],
            "op_swap": [{"op_name": "self_attention", "layers": ["1-2"]}],
        },
    },
}


@pytest.mark.parametrize("name", NEWER)
def test_the_newer_schema(name: str) -> None:
    model = build()
    with lowtide.apply(model, NEWER[name], engine=virtual(7)) as tide:
        for seed, (loss, gradients) in enumerate(plain_steps()):
            got_loss, got = step(model, seed)
            assert torch.equal(got_loss, loss)
            assert all(torch.equal(a, b) for a, b in zip(got, gradients, strict=True))
        assert tide.stats.num_divergences == 0
        assert tide.stats.swapped_bytes + tide.stats.recomputed_bytes > 0


def test_a_prefetch_in_layers_starts_where_backward_reaches_that_layer() -> None:
    model = build()
    with lowtide.apply(model, NEWER["both"], engine=virtual(7)) as tide:
        step(model, 0)
        nodes = {node.name: node for node in tide.profile.nodes}
        swapped = [site for site in tide.plan.sites if site.fate is Fate.SWAP]
        for site in swapped:
            index = int(site.name.split(".")[2])
            following = [node for node in tide.profile.sites if node.name.startswith(f"model.layers.{index + 1}.")]
            begins = max(node.last_sequence for node in following)
            assert nodes[site.name].last_sequence + site.prefetch == begins
        assert {int(site.name.split(".")[2]) for site in swapped} == {0, 1, 2}
        assert [
            (row.part, row.prefetch, row.prefetch_unit) for row in tide.source.file_plan.rows if row.fate == "swap"
        ] == [
            ("<layer>", 1, "layers"),
            ("self_attn", 1, "layers"),
            ("self_attn", 1, "layers"),
        ]


PARTS = (
    "attention",
    "feed_forward",
    "attention_norm",
    r"ffn_norm\.norm",
    r"attention\.flash_attention",
    r"attention\.apply_rotary_emb",
    r"attention\.wv",
    r"feed_forward\.mul",
    r"feed_forward\.w1",
    r"feed_forward\.w3",
    "add",
)


def drawn(seed: int) -> Config:
    """Some layers and ops recomputed, some swapped, with overlaps and readers in every relation."""
    draw = random.Random(seed)

    def some_layers() -> list[int]:
        return sorted(draw.sample(range(NUM_LAYERS), draw.randint(1, NUM_LAYERS)))

    swap = op_swap(*[(part, draw.choice((1, 3, 10, 50)), some_layers()) for part in draw.sample(PARTS, 4)])
    if draw.random() < 0.5:
        swap["layer_swap"] = [{"backward_prefetch": draw.choice((1, 20)), "layers": some_layers()}]
    recompute: Config = {"select_recompute": {part: some_layers() for part in draw.sample(PARTS, 3)}}
    if draw.random() < 0.5:
        recompute["recompute"] = draw.sample(range(NUM_LAYERS), 1)
    return {"recompute_config": recompute, "swap_config": swap, "compat": True}


@pytest.mark.parametrize("seed", one_of(4, range(8)))
def test_the_same_bits_whatever_is_mixed(seed: int) -> None:
    with lowtide.apply(model := build(), drawn(seed), engine=virtual(seed)) as tide:
        for data_seed, (loss, gradients) in enumerate(plain_steps()):
            got_loss, got = step(model, data_seed)
            assert torch.equal(got_loss, loss)
            assert all(torch.equal(a, b) for a, b in zip(got, gradients, strict=True))
        assert tide.stats.num_divergences == 0
        swapped = sum(row.nbytes for row in tide.source.file_plan.rows if row.fate == "swap")
        assert tide.stats.swapped_bytes == 3 * swapped


def rows(config: Config) -> list[tuple[int, str, str, int | None, int]]:
    model = build()
    with lowtide.apply(model, config, engine=virtual(7)) as tide:
        step(model, 0)
        return [(row.layer, row.part, row.fate, row.prefetch, row.nbytes) for row in tide.source.file_plan.rows]


def test_the_output_of_an_op_is_what_goes() -> None:
    assert rows({"recompute_config": {"select_recompute": {r"feed_forward\.mul": [2]}}}) == [
        (0, "mlp.mul", "recompute", None, INNER_ROW),
        (1, "mlp.mul", "recompute", None, INNER_ROW),
    ]


def test_the_default_swap_moves_what_the_attention_kernel_gives() -> None:
    found = rows(CONFIGS["swap by default"])
    assert [row[:4] for row in found] == [(index, "self_attn.sdpa", "swap", 10) for index in range(NUM_LAYERS)]
    logsumexp = 2 * 4 * TOKENS * 4
    assert {row[4] for row in found} == {ROW + logsumexp}


def test_what_a_recomputed_op_reads_stays() -> None:
    model = build()
    lines: list[str] = []
    from lowtide.mindformers.follow import follow, sections_in

    sections = sections_in(CONFIGS["a reader is recomputed"])
    with Listener(lines.append), follow(model, sections, engine=virtual(7)) as tide:
        step(model, 0)
        by_name = {site.name: site for site in tide.plan.sites}
        assert by_name["model.layers.0.mlp.act_fn.silu"].fate is Fate.KEEP
        assert by_name["model.layers.0.mlp.act_fn.silu"].reason == "'mlp.mul' of layer 0 reads it and is recomputed"
        assert by_name["model.layers.1.mlp.act_fn.silu"].fate is Fate.SWAP
        assert by_name["model.layers.1.mlp.act_fn.silu"].prefetch == 5
    table = [line for line in lines if line.startswith("0 ") and "act_fn" in line]
    assert len(table) == 1
    assert table[0].endswith("swap_config.op_swap[0]: 'mlp.mul' of layer 0 reads it and is recomputed")
    assert any("lowtide can swap what a recomputed part reads instead" in line for line in lines)


def test_the_output_of_a_layer_before_a_recomputed_one_stays() -> None:
    model = build()
    with lowtide.apply(model, CONFIGS["recomputed between swapped"], engine=virtual(7)) as tide:
        step(model, 0)
        fates = {site.name: site.fate for site in tide.plan.sites}
    assert fates["model.layers.0.add_1"] is Fate.KEEP
    assert fates["model.layers.0.add"] is Fate.SWAP


def test_lines_name_what_has_no_effect() -> None:
    lines: list[str] = []
    from lowtide.mindformers.follow import follow, sections_in

    config = {
        "recompute_config": {"select_comm_recompute": {r".*\.norm": [0]}},
        "swap_config": op_swap((r"attention\.wk", 3, [1]), (r"attention\.flash_attention", 100_000, [3])),
    }
    with Listener(lines.append), follow(model := build(), sections_in(config), engine=virtual(7)):
        step(model, 0)
        step(model, 1)
    for part in ("input_layernorm", "post_attention_layernorm"):
        nothing = "backward reads no result of a functional collective there"
        assert f"note: no effect: select_comm_recompute at '{part}' in layer 0: {nothing}" in lines
    assert "note: no effect: backward reads no output of 'self_attn.k_proj' in layer 1" in lines
    early = "note: backward_prefetch 100000 reaches past the start of backward in layer 3"
    assert lines.count(f"{early}: fetched as early as possible there") == 1


def test_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "model: {model_config: {num_layers: 4}}\nswap_config:\n  swap: True\n  default_prefetch: 10\n"
    Path("run.yaml").write_text(text)
    with lowtide.apply(model := build(), "run.yaml") as tide:
        step(model, 0)
        assert tide.source.file_plan.rows[0].why == "swap_config.default_prefetch (run.yaml:4:21)"
    Path("run.yaml").write_text(text.replace("4}", "5}"))
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(build(), "run.yaml")
    assert str(caught.value) == "run.yaml: says 5 layers, but the model has 4"


def test_strict_is_the_default_for_a_mapping() -> None:
    config = {"recompute_config": {"select_recompute": [r"feed_forward\.mull"]}}
    with pytest.raises(ConfigError) as caught:
        lowtide.apply(build(), config)
    assert str(caught.value) == (
        r"recompute_config.select_recompute[0]: 'feed_forward\.mull' names nothing in a layer; "
        "nearest: 'feed_forward.mul', 'feed_forward', 'feed_forward.w3.matmul'"
    )
    with lowtide.apply(build(), {**config, "compat": True}) as tide:
        assert tide.source.resolution.warnings


FAMILIES: dict[str, Config] = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
DEFAULTS = {
    "qwen3": {"mlp.mul", "mlp.act_fn"},
    "qwen3_moe": {"mlp.experts.mul", "mlp.experts.act_fn"},
    "deepseek_v3": {
        "mlp.mul",
        "mlp.act_fn",
        "mlp.shared_experts.mul",
        "mlp.shared_experts.act_fn",
        "mlp.experts.mul",
        "mlp.experts.act_fn",
    },
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_default_lists_of_a_family(kind: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = CONFIG_MAPPING[kind](**sizes, **heads, **FAMILIES[kind])

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).train()

    loss, gradients = step(make(), 0)
    parts = {}
    for config_name in ("default ops", "swap by default"):
        with lowtide.apply(model := make(), CONFIGS[config_name], engine=virtual(7)) as tide:
            for _ in range(2):
                got_loss, got = step(model, 0)
                assert torch.equal(got_loss, loss)
                assert all(torch.equal(a, b) for a, b in zip(got, gradients, strict=True))
            assert tide.stats.num_divergences == 0
            assert all(row.nbytes for row in tide.source.file_plan.rows)
            parts[config_name] = {row.part for row in tide.source.file_plan.rows}
    assert parts == {"default ops": DEFAULTS[kind], "swap by default": {"self_attn.sdpa"}}


def test_flags_about_shards_say_where_they_have_no_effect() -> None:
    from lowtide.mindformers.follow import follow, sections_in

    lines: list[str] = []
    config = {"recompute_config": {"recompute": [1], "parallel_optimizer_comm_recompute": True}}
    with Listener(lines.append), follow(model := build(), sections_in(config), engine=virtual(7)):
        step(model, 0)
    text = "no effect: parallel_optimizer_comm_recompute; no parameters are sharded by FSDP2 in this model"
    assert lines.count(f"note: {text}") == 1
    config["recompute_config"]["recompute"] = False
    lines.clear()
    with Listener(lines.append), follow(model := build(), sections_in(config), engine=virtual(7)):
        step(model, 0)
    key = "recompute_config.parallel_optimizer_comm_recompute"
    assert lines.count(f"note: no effect: {key}, because no layer is recomputed as a whole") == 1
