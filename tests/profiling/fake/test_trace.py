"""The traced step: what a real step would show, without running one."""

from __future__ import annotations

import dataclasses
import resource
import time

import pytest
import torch
import transformers
from torch import nn

from benchmarks.traced import trace_config
from lowtide.core.profile import Profile, Site
from lowtide.errors import ConfigError
from lowtide.profiling.fake.fake_model import find_runs
from lowtide.profiling.fake.trace import trace
from lowtide.profiling.observe_step import observe
from lowtide.tensors.codecs import always_fits
from lowtide.timeline.hardware import Hardware
from lowtide.timeline.step import Link
from tests.support import zoo
from tests.support.grid import one_of

HOST = Hardware(
    name="cpu-like",
    memory_bytes=2**34,
    flops_per_second={"float32": 1e11, "bfloat16": 4e11},
    attention={"flash": (2.8e11, 2.8e11)},
    ramp_tokens=0.0,
    memory_bytes_per_second=2e10,
    eager_bytes_per_second=2e10,
    launch_seconds=2e-6,
    link=Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9),
)
DEVICE = dataclasses.replace(
    HOST, name="device-like",
    flops_per_second={"float32": 5e13, "bfloat16": 7e14},
    attention={"flash": (4.9e14, 4.9e14)}, memory_bytes_per_second=4e12, eager_bytes_per_second=4e12,
)  # fmt: skip

EQUAL = (
    "llama", "llama_bf16", "llama_eager", "llama_autocast", "llama_cache", "qwen3_moe", "gpt2_dropout", "t5", "vit",
    "unet", "custom_function", "lora_autocast", "tied", "transformer_encoder", "shared_layer", "strided_views",
    "keyword_inputs", "structured_outputs", "complex", "integers", "stateful", "no_grad_inside", "nested",
    "checkpointed", "llama_checkpointed",
)  # fmt: skip


def without_times(profile: Profile) -> Profile:
    """What must be equal. Which codecs fit values that were looked at, a trace cannot know."""
    nodes = tuple(dataclasses.replace(node, recipe=_untimed(node), codec=_unseen(node)) for node in profile.nodes)
    return dataclasses.replace(profile, op_seconds=(), nodes=nodes, is_fake=False, device="")


def _untimed(node: Site):
    return None if node.recipe is None else dataclasses.replace(node.recipe, seconds=0.0)


def _unseen(node: Site):
    fits = node.codec is not None and node.codec.kind == always_fits(getattr(torch, node.dtype))
    return dataclasses.replace(node.codec, seconds=0.0) if fits else None


@pytest.mark.parametrize("name", one_of(6, EQUAL))
def test_fake_and_real_agree_in_every_byte_and_lifetime(name: str) -> None:
    case = zoo.CASES[name]
    model, batch = case.build(0), case.batch(0)
    before, footprint = dict(model.state_dict()), zoo.footprint(model)
    real = observe(model, batch, needs_scalar=False)
    fake = trace(model, batch, hardware=HOST, needs_scalar=False)
    assert fake.is_fake
    assert without_times(fake) == without_times(real)
    assert all(value.data_ptr() == before[key].data_ptr() for key, value in model.state_dict().items())
    assert zoo.footprint(model) == footprint


def small_config(kind: str, num_layers: int = 4, **overrides):
    import transformers

    sizes = {"vocab_size": 64, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    if kind == "llama":
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
        return transformers.LlamaConfig(**sizes | overrides)
    sizes |= {
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16, "num_key_value_heads": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_shared_experts": 1,
    }  # fmt: skip
    return transformers.DeepseekV3Config(**sizes | overrides)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("llama", {}, marks=pytest.mark.extended),
        pytest.param("llama", {"use_cache": False, "num_layers": 5}, marks=pytest.mark.extended),
        pytest.param("llama", {"attn_implementation": "eager"}, marks=pytest.mark.extended),
        ("deepseek", {"first_k_dense_replace": 4, "num_layers": 8}),
    ],
)
def test_skipping_equal_layers_changes_nothing(kind: str, options: dict) -> None:
    config = small_config(kind, **options)
    full = trace_config(config, tokens=16, hardware=DEVICE, skips_equal_layers=False)
    short = trace_config(config, tokens=16, hardware=DEVICE)
    assert short == full
    assert len(short.layers) == config.num_hidden_layers


def test_layers_that_differ_are_not_skipped() -> None:
    class Net(nn.Module):
        def __init__(self, widths: list[int]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, 8)) for w in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    def runs(widths: list[int]) -> list[tuple[str, ...]]:
        return [run[2:-1] for run in find_runs(Net(widths), tuple(f"layers.{i}" for i in range(len(widths))))]

    assert runs([4] * 6) == [("layers.2", "layers.3", "layers.4")]
    assert runs([4, 4, 4]) == []
    assert runs([4, 5, 4, 5, 4, 5]) == []
    assert runs([4] * 4 + [5] * 5) == [("layers.2",), ("layers.6", "layers.7")]
    model, batch = Net([4] * 4 + [5] * 5), (torch.ones(3, 8),)
    full = trace(model, batch, hardware=HOST, skips_equal_layers=False)
    assert trace(model, batch, hardware=HOST) == full
    assert without_times(full) == without_times(observe(model, batch))


def test_what_runs_between_layers_is_not_lost() -> None:
    """A layer that gives its input back would change the gradients around it: such models are traced in full."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x).tanh()
            return x.sum()

    model, batch = Net(), (torch.ones(3, 8),)
    assert without_times(trace(model, batch, hardware=HOST)) == without_times(observe(model, batch))


def test_layers_whose_output_is_not_their_input_again_are_all_traced() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x).tanh(), x.mean()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Pair() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = 0
            for layer in self.layers:
                x, mean = layer(x)
                total = total + mean
            return x.sum() + total

    model, batch = Net(), (torch.ones(3, 8),)
    assert without_times(trace(model, batch, hardware=HOST)) == without_times(observe(model, batch))


# ---------------------------------------------------------------------------------------------------------------------
# A layer of Llama 3 8B


class OneLayer(nn.Module):
    def __init__(self) -> None:
        import transformers
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
            num_hidden_layers=1, vocab_size=128256, rope_theta=500000.0, attn_implementation="sdpa",
        )  # fmt: skip
        self.rotary = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        return self.layers[0](hidden * 1, position_embeddings=self.rotary(hidden, positions), attention_mask=None)


def one_layer(device: str) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return OneLayer().train()
    finally:
        torch.set_default_dtype(torch.float32)


def hidden_states(tokens: int, device: str) -> torch.Tensor:
    return torch.zeros(1, tokens, 4096, dtype=torch.bfloat16, device=device, requires_grad=True)


def saved(profile: Profile) -> tuple[float, float]:
    """MiB of unique storages, and summed over saved tensors. The layer's input is the layer before's."""
    sites = [site for site in profile.sites if site.name != "mul"]
    return sum(s.nbytes for s in sites) / 2**20, sum(s.nbytes * len(s.reads) for s in sites) / 2**20


def test_a_layer_of_llama_3_8b_traced_saves_what_it_is_known_to_save() -> None:
    model = one_layer("meta")
    profile = trace(model, (hidden_states(4096, "meta"),), hardware=DEVICE, needs_scalar=False)
    unique, summed = saved(profile)
    assert unique == pytest.approx(786.5, rel=0.01)
    assert summed == pytest.approx(1044.6, rel=0.01)
    assert all(parameter.is_meta for parameter in model.parameters())
    flops = 2 * 218_103_808 * 4096 + 2 * 32 * 4096 * 4096 * 256 / 2
    products = [s for n, s in zip(profile.op_names, profile.op_seconds) if n.endswith((".mm", ".sdpa"))]
    attention = 2 * 32 * 4096 * 4096 * 256 / 2 * (1 / 0.7 - 1)
    assert sum(products) == pytest.approx((flops + attention) / 7e14, rel=0.01)


@pytest.mark.slow
def test_a_layer_of_llama_3_8b_observed_saves_the_same() -> None:
    model = one_layer("meta").to_empty(device="cpu")  # whatever the numbers are
    # Few tokens: products in bf16 take minutes on a CPU that has none, and everything saved grows with the tokens.
    unique, summed = saved(observe(model, (hidden_states(4, "cpu"),), needs_scalar=False))
    assert unique * 1024 == pytest.approx(786.5, rel=0.01)
    assert summed * 1024 == pytest.approx(1044.6, rel=0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Large models, accelerators, values


@pytest.mark.slow
def test_671_billion_parameters_take_seconds() -> None:
    """How little memory they take: tests/cli/test_plan.py."""
    start = time.process_time()
    profile = trace_config(transformers.DeepseekV3Config(), tokens=4096, hardware=DEVICE)
    assert time.process_time() - start < 6
    assert len(profile.layers) == 61
    assert profile.state.parameters == pytest.approx(2 * 671.03e9, rel=0.001)
    assert profile.saved_bytes == pytest.approx((3 * 1858 + 58 * 2871) * 2**20, rel=0.02)


def test_attention_of_unequal_widths_is_fused_on_a_device_and_not_on_the_host() -> None:
    config = small_config("deepseek", num_layers=2, qk_nope_head_dim=24)
    device = trace_config(config, tokens=128, hardware=DEVICE)
    host = trace_config(config, tokens=128, hardware=HOST)
    names = {site.name for site in device.sites}
    assert {"model.layers.0.self_attn.sdpa", "model.layers.0.self_attn.sdpa:1"} <= names
    scores = 4 * 128 * 128 * 2
    assert max(s.nbytes for s in device.sites if "self_attn" in s.name) < scores
    assert max(s.nbytes for s in host.sites if "self_attn" in s.name) >= scores
    assert trace_config(config, tokens=128, hardware=DEVICE, fused_attention=False).saved_bytes == host.saved_bytes


def test_loops_over_experts_become_grouped_products_and_the_config_comes_back() -> None:
    model = zoo._qwen3_moe("eager")
    batch = zoo.CASES["qwen3_moe"].batch(0)
    profile = trace(model, batch, hardware=HOST)
    assert any("grouped_mm" in name for name in profile.op_names)
    assert model.config._experts_implementation == "eager"


def test_small_values_are_known_and_others_are_asked_for() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            if count.item() > 2:
                return self.block(x).sum()
            return self.block(x)[self.block(x) > 0].sum()

    model, x = Looks(), torch.ones(2, 8)
    trace(model, (x, torch.tensor(3)), hardware=HOST)
    with pytest.raises(ConfigError) as error:
        trace(model, (x, torch.tensor(1)), hardware=HOST)
    assert str(error.value) == (
        "trace: the model looks at the values of its tensors (aten.index in the model), and a trace has none; profile "
        "it with real ones: `lowtide profile RUN.yaml`, or lowtide.observe(model, batch)"
    )
    assert type(model.block.weight) is nn.Parameter
    assert not model.block._forward_hooks


def test_mistakes_are_those_of_an_observed_step() -> None:
    with pytest.raises(ConfigError, match="the loss must be one number, not a tensor of shape"):
        trace(nn.Linear(4, 4), (torch.ones(2, 4),), hardware=HOST)
    with pytest.raises(ConfigError, match="the batch does not fit the model"):
        trace(nn.Linear(4, 4), (torch.ones(2, 5),), hardware=HOST, loss=torch.sum)


def test_fake_tensors_that_a_model_puts_away_do_not_stay() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.seen = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.last = self.linear(x)
            return self.seen.sum()

    model = Caches()
    trace(model, (torch.ones(2, 4),), hardware=HOST)
    assert model.seen is None
    assert not hasattr(model, "last")
    assert model(torch.ones(2, 4)).item() == model.seen.sum().item()


def test_a_lstm_lends_its_flat_weights_too() -> None:
    model = nn.LSTM(8, 8)
    weights = list(model._flat_weights)
    profile = trace(model, (torch.ones(3, 2, 8),), hardware=HOST, loss=lambda out: out[0].sum())
    assert profile.sites
    assert all(now is then for now, then in zip(model._flat_weights, weights))
    # Torch's cache of fake results would count a gradient of its backward twice from the second time on.
    again = trace(model, (torch.ones(3, 2, 8),), hardware=HOST, loss=lambda out: out[0].sum())
    assert dataclasses.replace(again, op_seconds=profile.op_seconds) == profile


def test_a_config_needs_no_memory_for_its_weights() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = small_config("llama", num_layers=16, **sizes)
    profile = trace_config(config, tokens=64, hardware=DEVICE, optimizer=torch.optim.AdamW)
    assert profile.state.parameters > 25 * 2**30
    assert profile.state.optimizer >= 2 * profile.state.parameters
    assert time.thread_time() - start < 60  # weights that are filled in take minutes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10
    assert torch.get_default_dtype() is torch.float32
