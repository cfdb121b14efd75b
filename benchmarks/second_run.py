"""What comparing second runs costs and catches: `python -m benchmarks.second_run cost|catch`.

`cost`: milliseconds of Python a recomputed decoder layer (13 modules, hidden 32, 16 tokens) beyond torch's own
non-reentrant checkpoint, steps interleaved; the share of a step that fingerprints take, on Llama and GPT-2.
`catch`: differences planted in one operator of a second run; how many of those that changed a saved tensor are refused.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import RecomputeRefusedError
from lowtide.runtime.recompute.fingerprint import Fingerprints
from lowtide.tensors.private import TorchDispatchMode, current_graph_task_id

_PLANTS: dict[str, Callable[[Tensor], Any]] = {
    "element": lambda t: t.view(-1)[t.numel() // 3].mul_(1.5),
    "row": lambda t: t.view(-1, t.shape[-1])[t.numel() // t.shape[-1] // 2].mul_(1.5),
    "head": lambda t: t.narrow(-1, 0, max(1, t.shape[-1] // 4)).mul_(1.5),
    "scale": lambda t: t.mul_(1 + 1e-3),
    "mask": lambda t: t.masked_fill_(torch.rand(t.shape) < 0.1, 0.0),
    "permutation": lambda t: t.copy_(t.flip(-1)),
}


def _model(name: str, hidden: int, tokens: int, layers: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "llama":
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, num_attention_heads=4))
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=hidden, n_layer=layers, vocab_size=64, n_head=4))
    return model.to(dtype).train(), torch.randint(64, (2, tokens))


def _layers(model: nn.Module) -> list[str]:
    return [
        name for name, module in model.named_modules() if type(module).__name__ in ("LlamaDecoderLayer", "GPT2Block")
    ]


def _apply(model: nn.Module, check: str = "full") -> Any:
    return lowtide.apply(model, {"recompute": "all", "min_bytes": 0, "layers": _layers(model), "check": check})


def _step(model: nn.Module, ids: Tensor) -> float:
    begin = time.process_time()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    return time.process_time() - begin


def cost(rounds: int) -> None:
    num_layers = 8
    models = [_model("llama", 32, 16, num_layers, torch.float32) for _ in range(3)]
    for layer in models[1][0].model.layers:
        forward = layer.forward
        layer.forward = lambda *args, _f=forward, **kwargs: checkpoint(_f, *args, use_reentrant=False, **kwargs)
    _apply(models[2][0])
    times: list[list[float]] = [[], [], []]
    for number in range(rounds + 5):
        for kind, (model, ids) in enumerate(models):
            seconds = _step(model, ids)
            if number >= 5:
                times[kind].append(seconds)
    for what, one, other in (("torch's checkpoint beyond plain", 1, 0), ("lowtide beyond torch's checkpoint", 2, 1)):
        gaps = sorted((b - a) / num_layers * 1e3 for b, a in zip(times[one], times[other], strict=True))
        low, high = gaps[len(gaps) // 4], gaps[3 * len(gaps) // 4]
        print(f"{what}: {statistics.median(gaps):.3f} ms a layer (quartiles {low:.3f} to {high:.3f})")
    for name in ("llama", "gpt2"):
        for hidden, tokens in ((32, 16), (256, 512)):
            _share(name, hidden, tokens)


def _share(name: str, hidden: int, tokens: int) -> None:
    model, ids = _model(name, hidden, tokens, 4, torch.float32)
    spent = [0.0, 0]
    of = Fingerprints.of

    def timed(self: Fingerprints, tensor: Tensor) -> Any:
        begin = time.process_time()
        found = of(self, tensor)
        spent[0] += time.process_time() - begin
        spent[1] += 1
        return found

    with _apply(model):
        for _ in range(3):
            _step(model, ids)
        Fingerprints.of = timed  # type: ignore[method-assign]  a benchmark's own measuring
        steps = sum(_step(model, ids) for _ in range(5))
        Fingerprints.of = of  # type: ignore[method-assign]
    each = spent[0] / 5 / 4 * 1e6
    print(f"{name}, hidden {hidden}, {tokens} tokens: {spent[1] / 40:.0f} fingerprints a run of a layer")
    print(f"    {each:.0f} us a layer and step, {spent[0] / steps:.2%} of a step")


class _Plant(TorchDispatchMode):
    """Changes the output of one operator in a second run."""

    def __init__(self, place: int, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.place, self.change, self.number, self.is_done = place, change, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_made = isinstance(out, Tensor) and out.is_floating_point() and out.dim() > 1 and out.is_contiguous()
        if (
            current_graph_task_id() != -1
            and torch.is_grad_enabled()
            and is_made
            and not any(out is a for a in args)
            and "view" not in str(func)
        ):
            if self.number == self.place:
                before = out.clone()
                self.change(out)
                self.is_done = not torch.equal(before, out)
            self.number += 1
        return out


def _is_caught(model: nn.Module, ids: Tensor, plant: _Plant) -> bool:
    """Whether a step is refused in which `plant` changes something."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    try:
        with plant:
            loss.backward()
    except RecomputeRefusedError:
        return True
    finally:
        model.zero_grad()
    return False


def catch(plants: int) -> None:
    for name in ("llama", "gpt2"):
        for dtype in (torch.float32, torch.bfloat16):
            models = [_model(name, 64, 32, 2, dtype) for _ in range(2)]
            tides = [_apply(model, check) for (model, _), check in zip(models, ("full", "deep"), strict=True)]
            for model, ids in models:
                _step(model, ids)
                _step(model, ids)
            for kind, change in _PLANTS.items():
                found = [0, 0, 0]
                for number in range(plants):
                    caught = []
                    for tide, (model, ids) in zip(tides, models, strict=True):
                        torch.manual_seed(number)
                        plant = _Plant(number * 3, change)
                        caught.append(_is_caught(model, ids, plant))
                        for watch in tide._context.watches.values():
                            watch.differs, watch.refusal = False, ""
                    found[0] += plant.is_done
                    found[1] += caught[1]
                    found[2] += caught[0]
                what = f"{name} {str(dtype)[6:]} {kind}: {found[0]} planted"
                print(f"{what}, {found[1]} refused by check: deep, {found[2]} by sampling", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cost", "catch"])
    parser.add_argument("--number", type=int, default=40, help="rounds, or plants of a kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    {"cost": cost, "catch": catch}[asked.what](asked.number)
