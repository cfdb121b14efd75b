"""torchtitan: lowtide in the place of its activation checkpointing, through the calls that its trainer makes.

The protocol is tested with a model of that shape; where torchtitan is installed, also with its own debug model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.adapters.torchtitan import TideInPlace, with_lowtide
from lowtide.runtime.session.forward_patch import patched_module
from tests.adapters.saving import saved_share
from tests.support.virtual_engine import virtual

ALONE = SimpleNamespace(pp_enabled=False)


class Decoder(nn.Module):
    """Blocks by number in `layers`, as every model of torchtitan has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, 16)
        self.layers = nn.ModuleDict(
            {str(number): nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16)) for number in range(3)}
        )
        self.output = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.output(x)


@dataclass
class Spec:
    """The part of a `ModelSpec` that matters here."""

    name: str
    post_optimizer_build_fn: Callable[..., None] | None


@dataclass
class Config:
    """The part of a `Trainer.Config` that matters here."""

    model_spec: Spec
    activation_checkpoint: Any


class Optimizers:
    """An `OptimizersContainer`: one optimizer for each model part."""

    def __init__(self, parts: list[nn.Module], num_each: int = 1) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts for _ in range(num_each)]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)


def _config(before: Callable[..., None] | None = None, **wish: Any) -> Config:
    config = Config(model_spec=Spec("decoder", before), activation_checkpoint=SimpleNamespace(name="SelectiveAC"))
    if wish:
        assert with_lowtide(config, engine=virtual(1), say=lambda line: None, **wish) is config
    return config


def _train(config: Config, *, attaches: bool = True) -> tuple[list[float], list[Tensor], Decoder]:
    """In the order of torchtitan's trainer: built on meta, checkpointed, initialized, given an optimizer, trained."""
    with torch.device("meta"):
        model = Decoder()
    if isinstance(config.activation_checkpoint, TideInPlace):
        config.activation_checkpoint.build(dump_folder="out").apply(model)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    optimizers = Optimizers([model])
    after = config.model_spec.post_optimizer_build_fn
    if after is not None and attaches:
        after(optimizers, [model], ALONE)
    losses = []
    for _ in range(4):
        tokens = torch.randint(32, (4, 24), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], model


WISHES: dict[str, dict[str, Any]] = {
    "roomy": {"budget": "1GiB"},
    "tight": {"budget": "270KiB", "memory": {"min_bytes": 0, "recompute": "none"}},
    "rules": {"memory": {"swap": "all", "min_bytes": 0}},
}


@pytest.mark.parametrize("name", WISHES)
def test_bits_are_those_without_lowtide(name: str) -> None:
    losses, weights, _ = _train(_config())
    config = _config(**WISHES[name])
    ours, own, model = _train(config)
    place = config.activation_checkpoint
    assert ours == losses
    assert all(torch.equal(one, other) for one, other in zip(own, weights, strict=True))
    assert bool(place.stats.swapped_bytes) == (name != "roomy")
    if name != "rules":
        assert (saved_share(place.tide) > 0) == (name == "tight")
    assert place.tide is lowtide.current(model)
    place.remove()
    assert patched_module(model) is None
    assert not model._forward_pre_hooks


def test_what_stood_there_runs_first() -> None:
    said: list[str] = []

    def before(optimizers: Any, parts: Any, dims: Any) -> None:
        said.append(f"{len(parts)} part, {lowtide.current(parts[0])}")

    _train(_config(before, **WISHES["roomy"]))
    assert said == ["1 part, None"]


def test_where_it_never_attaches_it_says_so() -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        _train(_config(**WISHES["roomy"]), attaches=False)
    assert str(caught.value) == (
        "with_lowtide: lowtide stands in activation_checkpoint, and was never given the optimizer, so nothing would be "
        "planned; keep model_spec.post_optimizer_build_fn as with_lowtide has set it"
    )


def test_what_is_not_covered_is_refused() -> None:
    config = _config(**WISHES["roomy"])
    after = config.model_spec.post_optimizer_build_fn
    assert after is not None
    parts: list[nn.Module] = [Decoder(), Decoder()]
    for given, words in (
        (
            (Optimizers(parts), parts, SimpleNamespace(pp_enabled=True)),
            "with_lowtide: pipeline parallelism is not covered; write parallelism.pipeline_parallel_degree=1, or give "
            "each stage a plan of its own with lowtide.optimize(stage, group=...)",
        ),
        ((Optimizers(parts[:1], 2), parts[:1], ALONE), "with_lowtide: needs one optimizer, and there are 2"),
    ):
        with pytest.raises(lowtide.ConfigError) as caught:
            after(*given)
        assert str(caught.value) == words
    with pytest.raises(lowtide.ConfigError, match=r"^with_lowtide: nothing to do;"):
        with_lowtide(_config())
    assert config.activation_checkpoint.to_dict() == {"lowtide": {"budget": "1GiB", "memory": "None"}}


def test_the_debug_model_of_the_library(tmp_path: Path) -> None:
    """Its own model, sharding, optimizer and protocol; bits also those of its own SelectiveAC."""
    pytest.importorskip("torchtitan")
    import torchtitan.distributed.parallel_dims as dims_module
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    def trained(wish: dict[str, Any] | None, *, own: bool) -> tuple[list[float], dict[str, Tensor], Any]:
        config = llama3_debugmodel()
        layers = config.model_spec.model.layers
        config.model_spec.model.layers = layers[:3]
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention needs a GPU
        config.optimizer.implementation = "for-loop"
        config.training.mixed_precision_param = "float32"
        if not own:
            config.activation_checkpoint = None
        if wish is not None:
            with_lowtide(config, engine=virtual(1), say=lambda line: None, **wish)
        dims = ParallelDims.from_config(config.parallelism, 1)
        with torch.device("meta"):
            model = config.model_spec.model.build()
        more: dict[str, Any] = {"training": config.training, "parallelism": config.parallelism}
        more |= {"compile_config": config.compile, "ac_config": config.activation_checkpoint, "dump_folder": ""}
        model = config.model_spec.parallelize_fn(model, parallel_dims=dims, **more)
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.train()
        optimizers = config.optimizer.build(model_parts=[model])
        if config.model_spec.post_optimizer_build_fn is not None:
            config.model_spec.post_optimizer_build_fn(optimizers, [model], dims)
        losses, generator = [], torch.Generator().manual_seed(2)
        for _ in range(3):
            tokens = torch.randint(2048, (12, 128), generator=generator)
            optimizers.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())
            loss.backward()
            optimizers.step()
            losses.append(loss.item())
        weights = {
            name.replace("_checkpoint_wrapped_module.", ""): parameter.to_local().detach().clone()
            for name, parameter in model.named_parameters()
        }
        return losses, weights, config.activation_checkpoint

    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29613",
    }
    torch.distributed.init_process_group("gloo")
    dims_module.device_type = "cpu"  # without an accelerator torchtitan takes cuda
    try:
        plain = trained(None, own=False)
        checkpointed = trained(None, own=True)
        between = 0
        for name, small in WISHES.items():
            wish = {**small, "budget": between} if name == "tight" else small
            ours = trained(wish, own=True)
            for other in (plain, checkpointed):
                assert ours[0] == other[0]
                assert all(torch.equal(ours[1][key], other[1][key]) for key in other[1])
            assert bool(ours[2].stats.swapped_bytes) == (name != "roomy")
            if name == "tight":
                assert saved_share(ours[2].tide) > 0.1
            if name == "roomy":
                predicted = ours[2].tide.plan.predicted
                between = (predicted.floor_bytes + predicted.plain_peak_bytes) // 2
            ours[2].remove()
    finally:
        torch.distributed.destroy_process_group()
