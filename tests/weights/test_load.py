"""Weights that come from a folder of safetensors, or from main memory, to the device or straight to their tier."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import lowtide
from tests.support import processes
from tests.support.virtual_engine import VirtualEngine
from tests.weights.test_bit_equality import Block, Small


class Double(Block):
    """A weight in double precision."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up.to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x).double()).float())


class Odd(Small):
    """A tied head, a frozen layer, a buffer that is saved, one that is not, and weights in two types."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)
        self.layers[2] = Double(24)
        self.register_buffer("scale", torch.full((24,), 1.5))
        self.register_buffer("shift", torch.full((24,), 0.25), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _saved(model: nn.Module, folder: Path, num_files: int = 1) -> Path:
    """A folder with the weights of a model, as safetensors has them: tied ones once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    folder.mkdir()
    names = list(tensors)
    files = {f"part{number}.safetensors": names[number::num_files] for number in range(num_files)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    if num_files > 1:
        file_of = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


def _on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    """Parameters without memory, buffers with."""
    with torch.device("meta"):
        model = kind()
    for name, buffer in kind().named_buffers():
        setattr(model, name, buffer)
    return model


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    found = {}
    for step in range(3):
        loss = model(torch.randint(0, 32, (2, 6), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach().clone()
    if handle is not None:
        handle.remove()
    return found | {name: value.detach().clone() for name, value in model.state_dict().items()}


def _assert_same(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("kind", [Small, Odd])
def test_load_fills_a_model_without_memory(kind: Callable[[], nn.Module], num_files: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    truth = kind()
    folder = _saved(truth, tmp_path / "saved", num_files)
    model = _on_meta(kind)
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lowtide.load(model, folder)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in after)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in truth.parameters()]
    _assert_same(model.state_dict(), truth.state_dict())
    plain = torch.optim.AdamW(truth.parameters(), lr=1e-2)
    _assert_same(_trained(model, optimizer), _trained(truth, plain))


def test_a_long_load_says_how_much_is_to_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.weights.load._SECONDS_BETWEEN_LINES", -1.0)
    model = Small()
    with caplog.at_level("INFO", logger="lowtide"):
        lowtide.load(_on_meta(Small), _saved(model, tmp_path / "saved"))
    *_, before_last, last = caplog.messages
    assert len(caplog.messages) == len([*model.parameters()]) and last == "lowtide.load: 0 MiB to go"
    assert before_last != last


@pytest.mark.parametrize("source", ["folder", "main memory"])
@pytest.mark.parametrize("update", ["step", "in_backward"])
@pytest.mark.parametrize("kind", [Small, Odd])
def test_weights_go_straight_to_their_tier(
    kind: Callable[[], nn.Module], update: str, source: str, tmp_path: Path
) -> None:
    """The optimizer was made while the weights had no memory."""
    torch.manual_seed(3)
    truth = kind()
    model = _on_meta(kind)
    where: dict[str, Any] = {"folder": _saved(truth, tmp_path / "saved")}
    if source == "main memory":
        model, where = kind(), {"device": "cpu"}
        model.load_state_dict(truth.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = VirtualEngine(4)
    handle = lowtide.swap_weights(model, optimizer, update=update, min_bytes=1, engine=engine, **where)
    assert handle.stats.swapped_bytes > 0
    assert handle.stats.peak_bytes <= max(parameter.nbytes for parameter in model.parameters())
    plain = torch.optim.AdamW(truth.parameters(), lr=1e-2)
    _assert_same(_trained(model, optimizer, handle), _trained(truth, plain))
    assert engine.violations == []


def test_what_the_budget_keeps_comes_too(tmp_path: Path) -> None:
    truth = Small()
    model = _on_meta(Small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder = _saved(truth, tmp_path / "saved")
    handle = lowtide.swap_weights(model, optimizer, budget="1GiB", min_bytes=1, folder=folder)
    assert handle.stats.swapped_bytes == 0
    plain = torch.optim.AdamW(truth.parameters(), lr=1e-2)
    _assert_same(_trained(model, optimizer, handle), _trained(truth, plain))


def test_a_model_of_transformers_from_its_shards(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    truth = transformers.LlamaForCausalLM(config)
    truth.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(config)
    model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = lowtide.swap_weights(model, optimizer, min_bytes=1, folder=tmp_path / "saved")
    tokens = torch.arange(10)[None]
    plain = torch.optim.AdamW(truth.parameters(), lr=1e-2)
    for _ in range(2):
        losses = [m(input_ids=tokens, labels=tokens).loss for m in (model, truth)]
        assert torch.equal(*losses)
        for loss, stepped in zip(losses, (optimizer, plain), strict=True):
            loss.backward()
            stepped.step()
            stepped.zero_grad()
    handle.remove()
    _assert_same(dict(model.named_parameters()), dict(truth.named_parameters()))


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(lowtide.ConfigError) as caught:
        call()
    return str(caught.value)


def test_refusals_touch_nothing(tmp_path: Path) -> None:
    truth = Small()
    folder = _saved(truth, tmp_path / "saved")
    model = _on_meta(Small)

    def refusal(at: Any = folder, of: nn.Module = model, device: Any = "cpu") -> str:
        return _refusal(lambda: lowtide.load(of, at, device=device))

    assert refusal(of=truth) == (
        "lowtide.load: Small has parameters on cpu; folder= fills a model that was built on 'meta'"
    )
    assert refusal(device="meta") == "lowtide.load: device 'meta' has no memory; give the device to train on"
    assert refusal(device="gpux").startswith("lowtide.load: device: Expected one of cpu, cuda")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(empty) == (
        f"lowtide.load: {empty} has no safetensors files with tensors; give the folder of a checkpoint"
    )
    wide = _on_meta(lambda: Small(32))
    assert refusal(of=wide) == (
        f"lowtide.load: 'embed.weight' is (32, 24) in {folder}/part0.safetensors, and (32, 32) in the model; give the "
        "folder of this model's checkpoint"
    )
    deep = _on_meta(lambda: Small(num_layers=5))
    assert refusal(of=deep).startswith(
        f"lowtide.load: {folder} has no tensor 'layers.4.norm.weight', 'layers.4.norm.bias', 'layers.4.up.weight' and "
        "2 more; its names begin with 'embed.weight', 'head.weight',"
    )
    with torch.device("meta"):
        odd = Odd()
    assert refusal(_saved(Odd(), tmp_path / "odd"), of=odd) == (
        f"lowtide.load: buffer 'shift' is on 'meta' and not in {tmp_path}/odd; build the model so that buffers have "
        "memory (accelerate.init_empty_weights does)"
    )
    parts = _saved(truth, tmp_path / "parts", 3)
    (parts / "part1.safetensors").unlink()
    assert refusal(parts) == (
        f"lowtide.load: {parts}/model.safetensors.index.json names '{parts}/part1.safetensors', which is not there; "
        "download it again"
    )
    (parts / "part1.safetensors").write_bytes(b"no header")
    assert refusal(parts).startswith(f"lowtide: {parts}/part1.safetensors is no safetensors file (")
    optimizer = torch.optim.AdamW(model.parameters())
    text = _refusal(lambda: lowtide.swap_weights(model, optimizer, budget=1000, min_bytes=1, folder=folder))
    assert text.startswith("lowtide.swap_weights: budget 0.001 MiB is too small")
    full = VirtualEngine(0, host_bytes=10_000, disk_bytes=10_000)
    text = _refusal(lambda: lowtide.swap_weights(model, optimizer, min_bytes=1, folder=folder, engine=full))
    assert "have no room on host and disk" in text
    tensors = {name: tensor.clone() for name, tensor in truth.state_dict().items()}
    (tmp_path / "quantized").mkdir()
    save_file(
        {**tensors, "head.weight": tensors["head.weight"].to(torch.int8)}, tmp_path / "quantized" / "x.safetensors"
    )
    assert refusal(tmp_path / "quantized") == (
        f"lowtide.load: 'head.weight' is I8 in {tmp_path}/quantized/x.safetensors, and torch.float32 in the model; "
        "if this is quantized, give the folder of a checkpoint that is not"
    )
    tied = _on_meta(Small)
    tied.head.weight = tied.embed.weight
    assert refusal(of=tied) == (
        f"lowtide.load: 'embed.weight' and 'head.weight' are one tensor in the model, and not the same in {folder}; "
        "build the model without tying them (tie_word_embeddings=False)"
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    lowtide.load(model, folder)
    _assert_same(model.state_dict(), truth.state_dict())


def test_a_parameter_that_cannot_be_exchanged_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    folder = _saved(Small(), tmp_path / "saved")
    model = _on_meta(Small)
    watched = weakref.ref(model.layers[2].up.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for call in (
        lambda: lowtide.load(model, folder),
        lambda: lowtide.swap_weights(model, optimizer, min_bytes=1, folder=folder, engine=VirtualEngine(0)),
    ):
        with pytest.raises(RuntimeError, match="weakref"):
            call()
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert watched() is model.layers[2].up.weight


PROGRAM = """
import sys, threading, time, torch, lowtide, safetensors.torch, lowtide.weights.swap
from lowtide.engines.tiers.host_buffers import configure_malloc

configure_malloc()
torch.set_num_threads(1)
mode = sys.argv[1]


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(40)))


if mode == "save":
    safetensors.torch.save_file(build().state_dict(), "model.safetensors")
    sys.exit()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


warm = torch.nn.Linear(1024, 64)
optimizer = torch.optim.SGD(warm.parameters(), lr=1e-2, momentum=0.9)
warm(torch.ones(4, 1024)).square().mean().backward()
optimizer.step()
before, most, over = resident(), 0, False


def watch():
    global most
    while not over:
        most = max(most, resident())
        time.sleep(0.001)


thread = threading.Thread(target=watch)
thread.start()
with torch.device("meta"):
    model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
handle = lowtide.swap_weights(model, optimizer, budget="80MiB", folder=".")
loaded = most
for _ in range(2):
    model(torch.ones(4, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
over = True
thread.join()
print((loaded - before) / 2**20, (most - before) / 2**20, sum(p.nbytes for p in model.parameters()) / 2**20)
"""


def test_a_model_of_twice_the_budget_is_never_there_as_a_whole(tmp_path: Path) -> None:
    """160 MiB of weights, and as many of gradients and of momenta, within 80 MiB and what the process takes beside."""
    status, _, err = processes.program(PROGRAM, tmp_path, "save")
    assert status == 0, err
    status, out, err = processes.program(PROGRAM, tmp_path, "train", seconds=200)
    assert status == 0, err
    loaded_mib, most_mib, weights_mib = map(float, out.split())
    assert weights_mib == 160
    assert loaded_mib <= 100
    assert most_mib <= 100
