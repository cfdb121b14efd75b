"""A zoo of tiny training steps that lowtide must not change by a single bit.

What: one `Case` per habit of real models that has broken (or could break) a system that moves or recomputes what
autograd saves: shared storages, views, own outputs, dropout, in-place operations, statistics updated in the forward,
keyword inputs, structured outputs, tied and frozen weights, autocast, custom functions, complex and sparse tensors.
Why: the runtime promises identical bits for every model. A promise about every model is only as good as the list
that it is tried on.

`train` runs real training steps (several micro-batches, an optimizer, a fresh batch each time) and returns everything
that a step leaves behind: losses, gradients, buffers, parameters, optimizer state, random state. `assert_same`
compares two such results byte by byte, so that a NaN equals itself and -0.0 does not equal 0.0.

Everything is small: the point is the shape of the graph, not the size of the numbers. transformers is imported by
the cases that need it, not by this module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64
WIDTH = 32
TOKENS = 8
SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, its data, its loss, and what a test may ask of lowtide for it."""

    name: str
    make: Callable[[], nn.Module]
    """Builds the model with the global random state, which `build` seeds."""
    make_batch: Callable[[torch.Generator], dict[str, Tensor]]
    """Draws one micro-batch on the host."""
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    layers: tuple[str, ...]
    """The repeated blocks, as `named_modules` calls them."""
    mixed_plans: tuple[Mapping[str, Any], ...] = ()
    """Hand-written plans (see `mixed`) that put different fates side by side."""
    autocast: torch.dtype | None = None
    draws: bool = False
    """The forward draws random numbers."""
    varies: bool = False
    """How many tensors a step saves depends on the data."""
    why: str = ""
    """What this case is in the zoo for."""

    def build(self, seed: int, device: str | torch.device = "cpu") -> nn.Module:
        """The model with random weights, in train mode."""
        torch.manual_seed(seed)
        return self.make().to(device).train()

    def batch(self, seed: int, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """One micro-batch. Drawn from its own generator: the global random state belongs to the model."""
        drawn = self.make_batch(torch.Generator().manual_seed(seed))
        return {key: value.to(device) for key, value in drawn.items()}

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The scalar loss, under the case's autocast."""
        device_type = next(model.parameters()).device.type
        context = torch.autocast(device_type, self.autocast) if self.autocast else contextlib.nullcontext()
        with context:
            return self.loss_of(model, inputs)


CASES: dict[str, Case] = {}


def register(case: Case) -> Case:
    """Adds a case to the zoo."""
    assert case.name not in CASES, case.name
    CASES[case.name] = case
    return case


def mixed(swap: list[str] | str = "none", recompute: list[str] | str = "none", keep: tuple[str, ...] = ()) -> dict:
    """A memory section in which everything but the named patterns is kept."""
    plan: dict[str, Any] = {"swap": swap, "recompute": recompute, "min_bytes": 0}
    return {**plan, "keep": list(keep)} if keep else plan


def alternating(layers: tuple[str, ...]) -> tuple[dict, ...]:
    """Swap even layers and recompute odd ones, and the other way round."""
    even, odd = list(layers[0::2]), list(layers[1::2])
    return (mixed(swap=even, recompute=odd), mixed(swap=odd, recompute=even)) if odd else ()


# ---------------------------------------------------------------------------------------------------------------------
# Running a case


@dataclass(frozen=True)
class Result:
    """What some steps left behind. Keys say which step (`0:weight`); values are copies."""

    loss: dict[str, Tensor]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    parameters: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    rng: dict[str, Tensor] = field(default_factory=dict)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum for the weights that train: has state, and is exact in every dtype of the zoo."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    *,
    num_steps: int = 1,
    accumulate: int = 1,
    device: str | torch.device = "cpu",
) -> Result:
    """Trains for `num_steps` steps of `accumulate` micro-batches each, every one with a batch of its own."""
    result = Result({}, {}, {}, {}, {}, {})
    torch.manual_seed(seed + 1)
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(accumulate):
            loss = case.loss(model, case.batch(1_000 * seed + 10 * step + micro, device))
            (loss / accumulate).backward()
            result.loss[f"{step}.{micro}"] = loss.detach().clone()
        result.grads.update(_copies(step, {k: p.grad for k, p in model.named_parameters() if p.grad is not None}))
        result.buffers.update(_copies(step, dict(model.named_buffers())))
        result.rng[str(step)] = torch.get_rng_state()
        if torch.device(device).type != "cpu":
            result.rng[f"{step}:device"] = torch.get_device_module(device).get_rng_state()
        optimizer.step()
    result.parameters.update(_copies(num_steps, dict(model.named_parameters())))
    result.optimizer.update(_optimizer_state(optimizer))
    return result


def plain_step(
    case: Case, seed: int, *, num_steps: int = 1, accumulate: int = 1, device: str | torch.device = "cpu"
) -> Result:
    """The same training without lowtide: the truth that everything else is compared with."""
    model = case.build(seed, device)
    return train(case, model, make_optimizer(model), seed, num_steps=num_steps, accumulate=accumulate, device=device)


@functools.lru_cache(maxsize=256)
def plain_result(name: str, seed: int, num_steps: int = 1, accumulate: int = 1, device: str = "cpu") -> Result:
    """`plain_step`, remembered: many plans are compared with the same truth."""
    return plain_step(CASES[name], seed, num_steps=num_steps, accumulate=accumulate, device=device)


def lowtide_step(
    case: Case,
    seed: int,
    memory: Mapping[str, Any],
    *,
    engine: Any,
    num_steps: int = 1,
    accumulate: int = 1,
    device: str | torch.device = "cpu",
) -> tuple[Result, Any]:
    """The same training under lowtide, and the stats after it. Checks that `remove` leaves the model as it was."""
    import lowtide

    model = case.build(seed, device)
    optimizer = make_optimizer(model)
    tide = lowtide.apply(model, memory, optimizer=optimizer, engine=engine)
    try:
        steps = {"num_steps": num_steps, "accumulate": accumulate, "device": device}
        result = train(case, model, optimizer, seed, **steps)
        stats = tide.stats
    finally:
        tide.remove()
    assert footprint(model) == plain_footprint(case.name, device)
    return result, stats


_EVERYWHERE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def footprint(model: nn.Module) -> dict[str, tuple]:
    """What lowtide may not leave a trace in: classes, attributes and hooks of every module, and state_dict keys."""
    trace: dict[str, tuple] = {
        name: (type(module).__qualname__, sorted(vars(module)), [len(getattr(module, h)) for h in _EVERYWHERE])
        for name, module in model.named_modules()
    }
    return {**trace, "state_dict": tuple(model.state_dict())}


@functools.lru_cache(maxsize=64)
def plain_footprint(name: str, device: str | torch.device = "cpu") -> dict[str, tuple]:
    """The footprint of a model that only ran plainly: transformers adds hooks of its own in a first forward."""
    case = CASES[name]
    model = case.build(0, device)
    case.loss(model, case.batch(0, device)).backward()
    return footprint(model)


def _copies(step: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{step}:{key}": value.detach().clone() for key, value in tensors.items()}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{k}": v.clone() for i, slots in state.items() for k, v in slots.items() if isinstance(v, Tensor)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes. NaNs with the same payload are equal; 0.0 and -0.0 are not."""
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout or a.device != b.device:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(result: Result, truth: Result) -> None:
    """Every loss, gradient, buffer, parameter, optimizer state and random state is the same to the bit."""
    wrong = []
    for part in ("loss", "grads", "buffers", "parameters", "optimizer", "rng"):
        got, want = getattr(result, part), getattr(truth, part)
        assert got.keys() == want.keys(), f"{part}: {sorted(got.keys() ^ want.keys())} in only one of the two results"
        wrong += [f"{part}[{key}]" for key in want if not same_bits(got[key], want[key])]
    count = sum(len(getattr(truth, part)) for part in ("loss", "grads", "buffers", "parameters", "optimizer", "rng"))
    assert not wrong, f"{len(wrong)} of {count} tensors differ: {wrong[:6]}"


# ---------------------------------------------------------------------------------------------------------------------
# Batches and losses


def token_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens that are their own labels."""
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def pair_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Source and target tokens of different lengths, with padding in the source."""
    source = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    mask = torch.ones_like(source)
    mask[0, -2:] = 0
    labels = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS - 2), generator=generator)
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def image_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Small images with class labels."""
    images = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 5, (SAMPLES,), generator=generator)}


def vector_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of features, not asking for gradients, as from a data loader."""
    return {"x": torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator)}


def hf_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The `.loss` of a transformers output."""
    return model(**inputs).loss


def square_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Mean square of whatever comes out: every output element gets its own gradient."""
    return model(**inputs).float().square().mean()


# ---------------------------------------------------------------------------------------------------------------------
# transformers models


def _llama(**overrides: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa", "use_cache": False,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **overrides}))


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.1,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _qwen3_moe(experts: str | None = None) -> nn.Module:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, moe_intermediate_size=16, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=1,
        use_cache=False, output_router_logits=True,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    if experts:
        model.set_experts_implementation(experts)
    return model


def _deepseek_v3() -> nn.Module:
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1, use_cache=False,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def _vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=8, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


_DECODER = ("model.layers.0", "model.layers.1")
_DECODER_PLANS = (
    *alternating(_DECODER),
    mixed(swap=["layers.*.mlp"], recompute=["layers.*.self_attn"]),
    mixed(swap=["layers.*.self_attn"], recompute=["layers.*.mlp"], keep=("layers.0",)),
)


def _decoder(name: str, make: Callable[[], nn.Module], **more: Any) -> Case:
    return register(
        Case(
            name=name, make=make, make_batch=token_batch, loss_of=hf_loss, layers=_DECODER,
            mixed_plans=_DECODER_PLANS, **more,
        )
    )  # fmt: skip


_decoder("llama", _llama, why="keyword inputs, shared rotary tables, norm outputs saved by several linears")
_decoder("llama_bf16", lambda: _llama().to(torch.bfloat16), why="fp32 copies inside the norms")
_decoder("llama_eager", lambda: _llama(attn_implementation="eager"), why="a softmax that saves its own output")
_decoder("llama_autocast", _llama, autocast=torch.bfloat16, why="cast copies of the weights among the saved tensors")
_decoder("llama_cache", lambda: _llama(use_cache=True), why="a cache object in the inputs that the layer appends to")
_decoder("qwen3_moe", _qwen3_moe, why="grouped experts, integer routing tables")
_decoder("qwen3_moe_eager", lambda: _qwen3_moe("eager"), varies=True, why="as many saved tensors as experts hit")
_decoder("deepseek_v3", _deepseek_v3, why="latent attention, a dense layer followed by a different, sparse one")

register(
    Case(
        name="gpt2_dropout",
        make=_gpt2,
        make_batch=token_batch,
        loss_of=hf_loss,
        layers=("transformer.h.0", "transformer.h.1"),
        mixed_plans=(
            *alternating(("transformer.h.0", "transformer.h.1")),
            mixed(swap=["h.*.attn"], recompute=["h.*.mlp"]),
        ),
        draws=True,
        why="random state: three dropouts in each layer, and tied embeddings",
    )
)
_T5 = tuple(f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2))
register(
    Case(
        name="t5",
        make=_t5,
        make_batch=pair_batch,
        loss_of=hf_loss,
        layers=_T5,
        mixed_plans=(*alternating(_T5), mixed(swap=["encoder.block.*"], recompute=["decoder.block.*"])),
        draws=True,
        why="cross-attention: the encoder's output enters every decoder layer; the position bias is handed on",
    )
)
register(
    Case(
        name="vit",
        make=_vit,
        make_batch=image_batch,
        loss_of=hf_loss,
        layers=("vit.layers.0", "vit.layers.1"),
        mixed_plans=alternating(("vit.layers.0", "vit.layers.1")),
        why="images, and a class token that is expanded and concatenated",
    )
)

# ---------------------------------------------------------------------------------------------------------------------
# Plain torch models


class Stack(nn.Module):
    """Layers one after the other, called `layers.0`, `layers.1`, ..."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _stack(name: str, layer: Callable[[], nn.Module], num_layers: int = 3, **more: Any) -> Case:
    """A case that is a stack of equal layers over vectors."""
    layers = tuple(f"layers.{i}" for i in range(num_layers))
    return register(
        Case(
            name=name,
            make=lambda: Stack(*(layer() for _ in range(num_layers))),
            make_batch=more.pop("make_batch", vector_batch),
            loss_of=square_loss,
            layers=layers,
            mixed_plans=alternating(layers),
            **more,
        )
    )


def _conv_block(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Two levels down, two up, with skip connections that outlive everything in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_conv_block(3, 4), _conv_block(4, 8)])
        self.middle = _conv_block(8, 8)
        self.up = nn.ModuleList([_conv_block(16, 4), _conv_block(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))
        return x


register(
    Case(
        name="unet",
        make=UNet,
        make_batch=lambda g: {"x": torch.randn(SAMPLES, 3, 16, 16, generator=g)},
        loss_of=square_loss,
        layers=("down.0", "down.1", "up.0", "up.1"),
        mixed_plans=(
            mixed(swap=["down.*"], recompute=["up.*"]),
            mixed(swap=["up.*"], recompute=["down.*"]),
            mixed(swap=["down.0"], recompute=["middle"], keep=("up.*",)),
        ),
        why="skip connections, in-place ReLU, statistics that a second forward would update twice",
    )
)


class _Gate(torch.autograd.Function):
    """y = x * sigmoid(g), saving an input, an output and an intermediate, with a hole between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(g)
        y = x * s
        ctx.save_for_backward(x, None, s, y)
        ctx.scale = 0.5
        count = (y > 0).sum()
        ctx.mark_non_differentiable(count)
        return y, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _count: Tensor) -> tuple[Tensor, Tensor]:
        x, hole, s, y = ctx.saved_tensors
        assert hole is None
        return grad * s + 0 * y, grad * x * s * (1 - s) * (2 * ctx.scale)


class _InPlaceExp(torch.autograd.Function):
    """exp in place: the saved tensor is the output, which is also the (dirty) input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, count = _Gate.apply(self.value(x), self.gate(x))
        return y + _InPlaceExp.apply(-y.square()) / (1 + count)


_stack("custom_function", CustomFunction, why="autograd.Function: inputs, outputs, intermediates, holes, dirty inputs")


class LoraLinear(nn.Module):
    """A frozen weight and a trained low-rank correction."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))


class LoraBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.first, self.second = LoraLinear(), LoraLinear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(self.norm(x))))


_stack("lora", LoraBlock, draws=True, why="frozen weights whose views are saved; the first input needs no gradient")
_stack("lora_autocast", LoraBlock, draws=True, autocast=torch.bfloat16, why="frozen weights, cast anew in each step")


class Tied(nn.Module):
    """One matrix is the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


register(
    Case(
        name="tied",
        make=Tied,
        make_batch=token_batch,
        loss_of=lambda model, inputs: model(**inputs),
        layers=("layers.0", "layers.1"),
        mixed_plans=alternating(("layers.0", "layers.1")),
        why="a parameter with two names",
    )
)


class Mlp(nn.Sequential):
    """A bare nn.Sequential: the layers are called `0`, `1`, ... and have no parent name."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


register(
    Case(
        name="mlp",
        make=lambda: Mlp(
            nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, 48), nn.Dropout(0.2), nn.Tanh(), nn.Linear(48, WIDTH)
        ),
        make_batch=vector_batch,
        loss_of=square_loss,
        layers=("0", "2", "5"),
        mixed_plans=(*alternating(tuple("012345")), mixed(swap=["0", "2"], recompute=["3", "4"])),
        draws=True,
        why="the smallest model; dropout as a layer of its own",
    )
)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


register(
    Case(
        name="transformer_encoder",
        make=_encoder,
        make_batch=lambda g: {"src": torch.randn(SAMPLES, TOKENS, WIDTH, generator=g)},
        loss_of=square_loss,
        layers=("layers.0", "layers.1"),
        mixed_plans=(
            *alternating(("layers.0", "layers.1")),
            mixed(swap=["layers.*.linear*"], recompute=["layers.*.self_attn", "layers.*.norm*"]),
        ),
        draws=True,
        why="torch's own layer: packed projections, views of one storage",
    )
)


class Shared(nn.Module):
    """One block, three calls: module names do not count calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.SiLU())])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.layers[0](x)
        return self.head(x)


register(
    Case(
        name="shared_layer",
        make=Shared,
        make_batch=vector_batch,
        loss_of=square_loss,
        layers=("layers.0",),
        mixed_plans=(mixed(swap=["layers.0"]), mixed(recompute=["layers.0"]), mixed(recompute=["layers.0.0"])),
        draws=True,
        why="three calls of one layer are alive at once",
    )
)


class Strided(nn.Module):
    """Saves views of every kind, and outputs of operations that save their own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.bias = nn.Parameter(torch.zeros(TOKENS, 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).chunk(2, dim=-1)  # two views of one storage, with an offset
        y = torch.tanh(a) * torch.softmax(b, dim=-1).transpose(0, 1).transpose(0, 1)
        flat = y.mean(-1, keepdim=True).expand_as(y)  # stride 0
        y = y * torch.exp(-b.square()) + flat * self.bias.expand_as(y).sigmoid()
        windows = y.as_strided((SAMPLES, TOKENS - 1, 2, WIDTH), (TOKENS * WIDTH, WIDTH, WIDTH, 1))  # overlapping
        y = torch.cat([y[:, :1], (windows * windows.cos()).sum(2)], dim=1)
        y = y[..., ::2].repeat_interleave(2, dim=-1).transpose(1, 2)  # strided, then not contiguous
        return (y * y.flip(-1)).transpose(1, 2).unflatten(-1, (4, -1)).permute(0, 1, 3, 2).flatten(2)[..., :WIDTH]


_stack("strided_views", Strided, why="offsets, strides, stride 0, overlap; tanh, softmax, exp, sigmoid save outputs")


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: Tensor, scale: Tensor, options: Mapping[str, Any]) -> Tensor:
        return torch.tanh(self.linear(hidden) * scale) * options["shift"] + hidden


class Keywords(nn.Module):
    """Layers that take every input by keyword, one of them inside a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(KeywordBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale, options = self.scale(x), {"shift": self.shift(x), "name": "shift"}
        for layer in self.layers:
            x = layer(hidden=x, scale=scale, options=options)
        return x


register(
    Case(
        name="keyword_inputs",
        make=Keywords,
        make_batch=vector_batch,
        loss_of=square_loss,
        layers=("layers.0", "layers.1", "layers.2"),
        mixed_plans=alternating(("layers.0", "layers.1", "layers.2")),
        why="checkpointing sees positional inputs only",
    )
)


@dataclass
class Output:
    """What a layer of `Structured` may return."""

    hidden: Tensor
    extra: dict[str, Tensor] | None = None
    note: str = ""


class StructuredBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).relu()
        if self.kind == "tuple":
            return y, (x, [y.square(), None])  # the input itself comes out again
        if self.kind == "dict":
            return {"hidden": y, "unused": y.exp(), "mask": y > 0}
        return Output(y, {"extra": y.cos().detach()}, "a dataclass")


class Structured(nn.Module):
    """Layers that return tuples, mappings and dataclasses, with outputs that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StructuredBlock(kind) for kind in ("tuple", "dict", "dataclass"))

    def forward(self, x: Tensor) -> Tensor:
        first, (again, (square, _)) = self.layers[0](x)
        second = self.layers[1](first + again)
        third = self.layers[2](second["hidden"].masked_fill(second["mask"], 0.5) + square)
        return third.hidden * third.extra["extra"]


register(
    Case(
        name="structured_outputs",
        make=Structured,
        make_batch=vector_batch,
        loss_of=square_loss,
        layers=("layers.0", "layers.1", "layers.2"),
        mixed_plans=alternating(("layers.0", "layers.1", "layers.2")),
        why="outputs that are not one tensor, unused outputs, an input that is an output",
    )
)


class ComplexBlock(nn.Module):
    """A Fourier filter and a conjugate product: saved tensors with the conjugate and the negative bit set."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(0.3 * torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft(self.linear(x)) * self.filter
        conjugate = z.conj()
        power = (z.roll(1, 0) * conjugate).real + conjugate.imag * z.angle()  # `.imag` of a conjugate: negative bit
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)))
        turned = pairs * torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2.0)).to(pairs.device).conj()
        return torch.view_as_real(turned).flatten(-2) + torch.fft.irfft(z, n=WIDTH) + power.tanh().mean()


_stack("complex", ComplexBlock, num_layers=2, why="complex storages, conjugate and negative views")


class Integers(nn.Module):
    """Operations that save indices and masks: gather, where, max-pool, sort, index_add, masked_fill."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        order = y.detach().argsort(dim=-1)
        y = torch.where(y > 0, y.gather(-1, order), y * 0.1)
        y = F.max_pool1d(y, 3, stride=1, padding=1) + y.cummax(dim=1).values.masked_fill(y < -1, 0.0)
        top, where = y.topk(4, dim=-1)
        return torch.zeros_like(y).index_add(1, order[0, :, 0] % TOKENS, y).scatter_add(-1, where, top) / 2


_stack("integers", Integers, why="int64 and bool storages")


class Empty(nn.Module):
    """An expert without tokens, an empty slice, an empty concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        nobody = torch.zeros(len(flat), dtype=torch.bool, device=x.device)
        empty = torch.tanh(self.experts[0](flat[nobody])).square()
        full = torch.cat([self.experts[1](flat[~nobody]), empty, flat[:0] * flat[:0]])
        return full.sin().view_as(x) + empty.sum()


_stack("zero_size", Empty, why="storages of zero bytes")


class InPlaceInput(nn.Module):
    """Changes its input in place after reading it: run again, the layer would see another input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x * 1.5))
        x.mul_(0.5).add_(y)
        return x * y


register(
    Case(
        name="inplace_input",
        make=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), InPlaceInput(), InPlaceInput(), nn.Linear(WIDTH, WIDTH)),
        make_batch=lambda g: {"input": torch.randn(SAMPLES, TOKENS, WIDTH, generator=g)},
        loss_of=square_loss,
        layers=("0", "1", "2", "3"),
        mixed_plans=(mixed(swap=["1"], recompute=["2"]), mixed(swap=["2"], recompute=["1"])),
        why="a layer that writes into its input",
    )
)


class Stateful(nn.Module):
    """Reads and then updates a buffer, as running maxima and spectral norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("average", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x) * self.average
        self.average = self.average * 0.9 + 0.1 * y.detach().abs().mean()  # replaced, not written into
        return y.tanh() * self.average


_stack("stateful", Stateful, why="buffers that the forward reads and changes")


class DrawsItself(nn.Module):
    """Random numbers in every way but nn.Dropout, and a branch taken by drawing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + torch.randn_like(x)
        y = F.rrelu(y, training=True) * torch.bernoulli(torch.full_like(y, 0.5))
        return y + x if torch.rand(()) < 0.5 else y * y


_stack("draws", DrawsItself, draws=True, varies=True, why="random ops of several kinds, and a random graph")


class NoGrad(nn.Module):
    """Parts that do not ask for gradients: a teacher under no_grad, a detach, a frozen sub-block."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).tanh()
        y = self.student(x).tanh()
        return y * target + (y - target).square() * y.detach()


_stack("no_grad_inside", NoGrad, why="tensors without history among the saved ones")


class SparseProduct(nn.Module):
    """A sparse matrix is saved: a tensor without a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        graph = torch.eye(WIDTH, device=x.device).roll(1, 0).to_sparse()
        return torch.sparse.mm(graph, self.linear(x).flatten(0, 1).t()).t().view_as(x).tanh()


_stack("sparse", SparseProduct, why="saved tensors that have no storage")


class Nested(nn.Module):
    """Blocks inside blocks inside a list: a pattern may name any level."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Stack(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)), nn.Sequential(nn.SiLU())) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


register(
    Case(
        name="nested",
        make=Nested,
        make_batch=vector_batch,
        loss_of=square_loss,
        layers=("layers.0", "layers.1"),
        mixed_plans=(
            *alternating(("layers.0", "layers.1")),
            mixed(swap=["layers.0.layers.0"], recompute=["layers.0.layers.1", "layers.1"]),
        ),
        draws=True,
        why="a layer of one level is inside a layer of another",
    )
)


class Checkpointed(nn.Module):
    """The author already recomputes half of the layers, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        x = self.layers[2](x)
        return checkpoint(self.layers[3], x, use_reentrant=True)


register(
    Case(
        name="checkpointed",
        make=Checkpointed,
        make_batch=vector_batch,
        loss_of=square_loss,
        layers=tuple(f"layers.{i}" for i in range(4)),
        mixed_plans=(mixed(swap=["layers.0", "layers.2"]), mixed(swap=["layers.1"], recompute=["layers.2"])),
        draws=True,
        why="hooks inside a checkpointed function defeat checkpointing",
    )
)


def _checkpointed_llama() -> nn.Module:
    model = _llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


_decoder("llama_checkpointed", _checkpointed_llama, why="transformers' own checkpointing is on")
