"""The models that the questions are asked of, each with a batch and a step.

What: `build(name, ...)` gives a `Subject`: a transformers model, or our U-Net (unet.py), with random weights and fixed
seeds, one batch, and `step`, a forward and a backward pass. Three scales: `tiny` for tests, `small` for a CPU (steps of
0.2 to 2 s on two cores), `large` for a GPU (layers of the size of Llama-7B's, and what goes with them).
Why random weights: time and memory of a step do not depend on them, and nothing has to be fetched.
Cost: a second. Not covered: what optimizers cost (another question), losses that a program takes outside the model.

Random state: every step sets the same seed first, so that models with dropout give the same gradients again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("llama", "gpt2", "qwen3_moe", "vit", "t5", "bert", "unet")
SCALES = ("tiny", "small", "large")
_SEED = 1234
_VOCABULARY = 256
_PATCH = 16
_MIN_BYTES = 2**16
_TINY = {
    "layers": 3,
    "hidden": 64,
    "heads": 2,
    "intermediate": 128,
    "batch": 4,
    "sequence": 64,
    "vocabulary": 32,
    "min_bytes": 2**12,
}

# Head sizes follow. The sequence of vit is its number of patches: an image of 14 x 14 patches of 16 pixels has 196.
# That of unet is its number of pixels, its layers are levels below the first, its hidden size the channels of that one.
_SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "llama": {
        "tiny": {**_TINY},
        "small": {"layers": 6, "hidden": 512, "heads": 8, "intermediate": 1376, "batch": 2, "sequence": 512},
        "large": {"layers": 6, "hidden": 4096, "heads": 32, "intermediate": 11008, "batch": 1, "sequence": 4096},
    },
    "gpt2": {
        "tiny": {**_TINY},
        "small": {"layers": 4, "hidden": 384, "heads": 6, "intermediate": 1536, "batch": 4, "sequence": 256},
        "large": {"layers": 12, "hidden": 1600, "heads": 25, "intermediate": 6400, "batch": 8, "sequence": 1024},
    },
    "qwen3_moe": {
        "tiny": {**_TINY, "experts": 4},
        "small": {
            "layers": 4,
            "hidden": 256,
            "heads": 4,
            "intermediate": 384,
            "batch": 4,
            "sequence": 256,
            "experts": 8,
        },
        "large": {
            "layers": 8,
            "hidden": 2048,
            "heads": 32,
            "intermediate": 768,
            "batch": 4,
            "sequence": 2048,
            "experts": 32,
        },
    },
    "vit": {
        "tiny": {**_TINY},
        "small": {"layers": 4, "hidden": 384, "heads": 6, "intermediate": 1536, "batch": 4, "sequence": 196},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096, "batch": 64, "sequence": 196},
    },
    "t5": {
        "tiny": {**_TINY},
        "small": {"layers": 3, "hidden": 384, "heads": 6, "intermediate": 1024, "batch": 4, "sequence": 192},
        "large": {"layers": 12, "hidden": 1024, "heads": 16, "intermediate": 4096, "batch": 16, "sequence": 512},
    },
    "bert": {
        "tiny": {**_TINY},
        "small": {"layers": 4, "hidden": 384, "heads": 6, "intermediate": 1536, "batch": 4, "sequence": 256},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096, "batch": 32, "sequence": 512},
    },
    "unet": {
        "tiny": {"layers": 2, "hidden": 8, "batch": 2, "sequence": 1024, "min_bytes": 2**12},
        "small": {"layers": 3, "hidden": 24, "batch": 4, "sequence": 128 * 128},
        "large": {"layers": 4, "hidden": 64, "batch": 16, "sequence": 512 * 512},
    },
}


def shape(name: str, scale: str, overrides: Mapping[str, int | None] | None = None) -> dict[str, int]:
    """The shape of a subject: `layers`, `hidden`, `batch`, ... `overrides` replaces those that are not None."""
    found = dict(_SHAPES[name][scale])
    found.update({key: value for key, value in (overrides or {}).items() if value is not None})
    return found


@dataclass(slots=True)
class Subject:
    """A model, its batch, and how its step is run. A method may replace `forward`, `around` and `around_forward`."""

    model: Any
    batch: dict[str, Any]
    device: Any
    forward: Callable[..., Any]
    rebuild: Callable[[], Subject]
    """Another one like it, for planners that want a model of fake tensors."""
    min_bytes: int
    """Storages below this stay, under lowtide."""
    optimizer: Any = None
    """Steps after backward, if there is one. `add_optimizer` gives one that leaves the weights as they are."""
    around: Callable[[], Any] = contextlib.nullcontext
    """A context of forward and backward."""
    around_forward: Callable[[], Any] = contextlib.nullcontext

    def step(self) -> Any:
        """Forward and backward; the loss, detached. Gradients stay where they are, as with accumulation: otherwise the
        peak of a small budget is theirs alone."""
        import torch

        self.model.zero_grad(set_to_none=False)
        torch.manual_seed(_SEED)
        with self.around():
            with self.around_forward():
                loss = self.forward(**self.batch).loss
            loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def add_optimizer(self) -> None:
        """AdamW with its state there. Its rate is 0: all steps have the same weights, and so the same gradients."""
        import torch

        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait for the device; nothing on a CPU."""
        import torch

        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def checkpointable(self) -> list[Any]:
        """The blocks that transformers itself can put under checkpointing."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]


def build(name: str, sizes: Mapping[str, int], *, device: str = "cpu", dtype: str = "float32") -> Subject:
    """The subject `name` with the given `shape`, in train mode, with zero gradients in place."""
    import torch

    torch.manual_seed(_SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = _MODELS[name](sizes).train()
    finally:
        torch.set_default_dtype(before)
    batch = draw_batch(name, sizes, device=device, dtype=dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rebuild = functools.partial(build, name, sizes, device=device, dtype=dtype)
    return Subject(model, batch, torch.device(device), model, rebuild, sizes.get("min_bytes", _MIN_BYTES))


def draw_batch(name: str, sizes: Mapping[str, int], *, device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """One batch of `sizes['batch']` samples."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    samples, length = sizes["batch"], sizes["sequence"]
    if name == "vit":
        side = _PATCH * _patches_a_side(sizes)
        pixels = torch.rand(samples, 3, side, side, generator=generator)
        labels = torch.randint(0, 10, (samples,), generator=generator)
        return {"pixel_values": pixels.to(device, getattr(torch, dtype)), "labels": labels.to(device)}
    if name == "unet":
        from benchmarks.unet import NUM_CLASSES, side_of

        side = side_of(sizes)
        pixels = torch.rand(samples, 3, side, side, generator=generator)
        labels = torch.randint(0, NUM_CLASSES, (samples, side, side), generator=generator)
        return {"pixel_values": pixels.to(device, getattr(torch, dtype)), "labels": labels.to(device)}
    ids = torch.randint(2, _vocabulary(sizes), (samples, length), generator=generator).to(device)
    if name == "t5":
        return {"input_ids": ids, "labels": ids[:, : max(length // 2, 1)].contiguous()}
    return {"input_ids": ids, "labels": ids}


def _vocabulary(sizes: Mapping[str, int]) -> int:
    return sizes.get("vocabulary", _VOCABULARY)


def _patches_a_side(sizes: Mapping[str, int]) -> int:
    return max(round(sizes["sequence"] ** 0.5), 1)


def _llama(sizes: Mapping[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_vocabulary(sizes),
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["intermediate"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            max_position_embeddings=sizes["sequence"],
            use_cache=False,
        )
    )


def _gpt2(sizes: Mapping[str, int]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=_vocabulary(sizes),
            n_positions=sizes["sequence"],
            n_embd=sizes["hidden"],
            n_inner=sizes["intermediate"],
            n_layer=sizes["layers"],
            n_head=sizes["heads"],
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _qwen3_moe(sizes: Mapping[str, int]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=_vocabulary(sizes),
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["intermediate"],
            moe_intermediate_size=sizes["intermediate"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=max(sizes["heads"] // 4, 1),
            head_dim=sizes["hidden"] // sizes["heads"],
            num_experts=sizes["experts"],
            num_experts_per_tok=max(sizes["experts"] // 4, 1),
            max_position_embeddings=sizes["sequence"],
            use_cache=False,
        )
    )


def _vit(sizes: Mapping[str, int]) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=_PATCH * _patches_a_side(sizes),
            patch_size=_PATCH,
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["intermediate"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_labels=10,
        )
    )


def _t5(sizes: Mapping[str, int]) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=_vocabulary(sizes),
            d_model=sizes["hidden"],
            d_kv=sizes["hidden"] // sizes["heads"],
            d_ff=sizes["intermediate"],
            num_layers=sizes["layers"],
            num_decoder_layers=sizes["layers"],
            num_heads=sizes["heads"],
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def _bert(sizes: Mapping[str, int]) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=_vocabulary(sizes),
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["intermediate"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            max_position_embeddings=sizes["sequence"],
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            use_cache=False,
        )
    )


def _unet(sizes: Mapping[str, int]) -> Any:
    from benchmarks.unet import build_unet

    return build_unet(sizes)


_MODELS = {
    "llama": _llama,
    "gpt2": _gpt2,
    "qwen3_moe": _qwen3_moe,
    "vit": _vit,
    "t5": _t5,
    "bert": _bert,
    "unet": _unet,
}
