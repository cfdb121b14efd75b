"""What lowtide says about a published run: its time and its peak, from the model, the layout and the device alone.

What: `Run` is a row of published/runs.csv; `forecast` traces its model with fake tensors on the roofline of its device,
recomputes what the run recomputed, plays the network where it is sharded, and adds the optimizer's step.
Stand-ins: transformers' Llama for each program's own Llama, and its OPT without biases for MPT (learned positions, two
matrices of an MLP, no gate), since the one of transformers has no fused attention.
Not covered: kernels of the programs themselves, the host that falls behind, ranks that wait for each other.
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.core.profile import Profile, Site
    from lowtide.timeline.hardware import Hardware

FOLDER = Path(__file__).parent / "published"
GIB = 2**30
FLASH1_SHARES = (0.40 / 0.73, 0.30 / 0.63)
"""Of the rates of FlashAttention-2, what the first one reaches, forward and backward: 30-50 % and 25-35 % of an A100's
peak instead of 73 % and 63 %, FlashAttention-2, arXiv 2307.08691, section 1. The MPT runs took it: their command's
`attn_impl` is the Triton kernel of that time (mosaicml/llm-foundry, scripts/train/benchmarking, October 2023)."""
_PAGED = "paged 8-bit AdamW"
_OWN_DEVICES = ("h100_500w",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row of runs.csv."""

    id: str
    is_aside: bool
    kind: str
    mode: str
    model: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    batch: int
    seq: int
    weights: str
    device: str
    gpus: int
    shards: int
    recompute: str
    loss: str
    seconds: float
    peak_bytes: float | None
    peak_kind: str
    source: str
    note: str

    @property
    def is_allocated(self) -> bool:
        """The peak is the allocator's own; a reserved one is more than what was used."""
        return self.peak_bytes is not None and self.peak_kind != "reserved"


def read_runs(path: Path = FOLDER / "runs.csv") -> tuple[Run, ...]:
    """All rows, in the order of the file."""
    numbers = {"layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "batch", "seq", "gpus", "shards"}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        Run(
            is_aside=row["aside"] == "yes",
            seconds=float(row["seconds"]),
            peak_bytes=float(row["peak_gib"]) * GIB if row["peak_gib"] else None,
            **{
                key: int(value) if key in numbers else value
                for key, value in row.items()
                if key not in {"aside", "seconds", "peak_gib"}
            },
        )
        for row in rows
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds of one micro-batch, and bytes at its worst moment."""

    seconds: float
    peak_bytes: int
    exposed_seconds: float
    recompute_seconds: float
    optimizer_seconds: float


def forecast(run: Run) -> Forecast:
    """What lowtide says about `run`."""
    from lowtide.cluster.sharded import Sharding, play_network, sharded_profile
    from lowtide.planner.rerun_layers import with_reruns
    from lowtide.timeline.hardware import load_cluster

    hardware = device_of(run)
    profile, layer_bytes = traced(run, hardware)
    layers = {"full": profile.layers, "second": profile.layers[::2]}.get(run.recompute, ())
    if run.mode == "compiled":
        # A compiled layer saves when all of it has run, so its second run does not end before.
        calls = tuple(dataclasses.replace(call, enough_op=call.end_op) for call in profile.calls)
        profile = dataclasses.replace(profile, calls=calls)
    step = with_reruns(profile, layers)
    again = sum(step.op_seconds) - sum(profile.op_seconds)
    if run.recompute == "op":
        again = sum(_again_by_operators(profile))
        step = dataclasses.replace(step, op_seconds=_with_again(profile))
    seconds, exposed, ranks = sum(step.op_seconds), 0.0, 1
    if run.kind == "fsdp":
        stored = 4 if run.weights == "fp32" else 2
        reduced = 2 if run.model == "mpt" else 4
        ranks = run.shards
        sharding = Sharding(
            ranks=ranks, replicas=run.gpus // ranks, stored_width=stored, reduced_width=reduced,
            gathered_width=4 if run.model == "mpt" else 2,
            has_copies=run.model != "mpt",
        )  # fmt: skip
        played = play_network(step, layer_bytes, sharding, load_cluster(_cluster_of(run)), hardware)
        seconds, exposed = played.step_seconds, played.exposed_seconds
        step = sharded_profile(step, layer_bytes, sharding)
    optimizer = _optimizer_seconds(run, profile.state.parameters / (4 if run.model == "mpt" else 2) / ranks, hardware)
    return Forecast(
        seconds=seconds + optimizer,
        peak_bytes=_peak_bytes(run, step),
        exposed_seconds=exposed,
        recompute_seconds=again,
        optimizer_seconds=optimizer,
    )


def device_of(run: Run) -> Hardware:
    from lowtide.timeline.hardware import load_hardware

    found = load_hardware(FOLDER / f"{run.device}.toml" if run.device in _OWN_DEVICES else run.device)
    if run.model != "mpt":
        return found
    forward, backward = FLASH1_SHARES
    flash = found.attention["flash"]
    return dataclasses.replace(found, attention={"flash": (forward * flash[0], backward * flash[1])})


def _cluster_of(run: Run) -> str:
    return {"h100_500w": "h100"}.get(run.device, run.device)


def traced(run: Run, hardware: Hardware) -> tuple[Profile, dict[str, int]]:
    """The plain step, and the bytes of each layer's parameters."""
    import torch

    from benchmarks.compiled_times import of_all, of_layers
    from lowtide.loss.attach import attach_where
    from lowtide.profiling.fake.trace import trace

    with torch.device("meta"):
        model = _model_of(run).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for group in optimizer.param_groups:
        group["fused"] = True
    tokens = torch.empty(run.batch, run.seq, dtype=torch.int64, device="meta")
    if run.model == "mpt":
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    with attach_where(model, may=run.loss == "chunked", must=run.loss == "chunked"):
        profile = trace(
            model, {"input_ids": tokens, "labels": tokens}, hardware=hardware, optimizer=optimizer,
            price=(of_layers if "torchtitan" in run.source else of_all) if run.mode == "compiled" else None,
        )  # fmt: skip
    modules = dict(model.named_modules())
    layer_bytes = {name: sum(parameter.nbytes for parameter in modules[name].parameters()) for name in profile.layers}
    return profile, layer_bytes


def _model_of(run: Run) -> Any:
    import torch

    if "torchtitan" in run.source:
        from benchmarks.published_models import TitanLlama

        return TitanLlama(
            layers=run.layers, hidden=run.hidden, ffn=run.ffn, heads=run.heads, kv_heads=run.kv_heads, vocab=run.vocab,
            seq=run.seq,
        )  # fmt: skip
    from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

    shared: dict[str, Any] = {"vocab_size": run.vocab, "hidden_size": run.hidden, "num_hidden_layers": run.layers,
                              "num_attention_heads": run.heads, "max_position_embeddings": run.seq,
                              "use_cache": False}  # fmt: skip
    config: Any
    if run.model == "mpt":
        config = OPTConfig(
            **shared, ffn_dim=run.ffn, word_embed_proj_dim=run.hidden, activation_function="gelu", enable_bias=False,
            dropout=0.0,
        )  # fmt: skip
    else:
        is_tied = run.layers == 28  # of the Llamas, the one of 3B shares embedding and head
        config = LlamaConfig(
            **shared, intermediate_size=run.ffn, num_key_value_heads=run.kv_heads, tie_word_embeddings=is_tied
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32 if run.model == "mpt" else torch.bfloat16)


def _is_product(name: str) -> bool:
    return name.removesuffix(":backward").rpartition(".")[2].rstrip("_0123456789") in {"mm", "addmm"}


def _again_of(profile: Profile, layer: str) -> float:
    """Selective recompute of operators: every second product, and all that is no product; attention is kept."""
    seconds, num_products = 0.0, 0
    for call in profile.calls:
        if call.name != layer:
            continue
        for number in range(call.first_op, call.end_op):
            name = profile.op_names[number]
            if _is_product(name):
                num_products += 1
                seconds += profile.op_seconds[number] if num_products % 2 == 0 else 0.0
            elif not name.endswith("sdpa"):
                seconds += profile.op_seconds[number]
    return seconds


def _again_by_operators(profile: Profile) -> list[float]:
    return [_again_of(profile, layer) for layer in profile.layers]


def _with_again(profile: Profile) -> tuple[float, ...]:
    """What is made again of a layer counts where its backward begins."""
    seconds = list(profile.op_seconds)
    for layer, extra in zip(profile.layers, _again_by_operators(profile), strict=True):
        first = next(
            number
            for number in range(profile.num_forward_ops, len(profile.op_names))
            if profile.op_names[number].startswith(f"{layer}.")
        )
        seconds[first] += extra
    return tuple(seconds)


def _optimizer_seconds(run: Run, num_parameters: float, hardware: Hardware) -> float:
    """A fused AdamW reads weights, gradients and two moments, and writes all but the gradients. Moments of 8 bits that
    are paged cross the link, in and out side by side."""
    width = 4 if run.weights == "fp32" else 2
    moment = 1 if _PAGED in run.note else width
    micro_batches = 4 if "4 micro-batches" in run.note else 1
    seconds = (3 * width + 4 * moment) * num_parameters / hardware.memory_bytes_per_second
    if _PAGED in run.note:
        link = hardware.link
        seconds += 2 * moment * num_parameters / min(link.in_bytes_per_second, link.out_bytes_per_second)
    return seconds / micro_batches


def _peak_bytes(run: Run, step: Profile) -> int:
    """The worst moment of a micro-batch. Compiled code keeps no result of an element-wise operator that it can make
    again, unless a product or attention reads it."""
    from lowtide.config.memory import load_memory
    from lowtide.core.fate import Fate
    from lowtide.planner.by_rules import problem_of
    from lowtide.timeline.memory import curve

    if _PAGED in run.note:
        step = dataclasses.replace(step, state=dataclasses.replace(step.state, optimizer=0))
    if "optimizer in backward" in run.note:  # each gradient goes as soon as it was used
        pairs = zip(step.op_bytes, step.op_gradient_bytes, strict=True)
        step = dataclasses.replace(
            step,
            state=dataclasses.replace(step.state, gradients=0),
            op_bytes=tuple(nbytes - made for nbytes, made in pairs),
            op_gradient_bytes=(0,) * len(step.op_bytes),
        )
    problem = problem_of(step, load_memory({"budget": 1 << 50}), layers=(), has_gradients="4 micro-batches" in run.note)
    fates = [Fate.KEEP] * len(problem.step.items)
    made = {node.name for node in step.nodes if _is_made_again(step, node)} if run.mode == "compiled" else set()
    inputs = {name for call in step.calls for name in call.inputs} if "layer inputs offloaded" in run.note else set()
    for number, item in enumerate(problem.step.items):
        if item.name in made and Fate.RECOMPUTE in item.fates:
            fates[number] = Fate.RECOMPUTE
        elif item.name in inputs and Fate.SWAP in item.fates:
            fates[number] = Fate.SWAP
    return int(curve(problem.step, fates).max())


def _is_made_again(step: Profile, node: Site) -> bool:
    if node.recipe is None or any(_is_product(op.op.partition(".")[2].partition(".")[0]) for op in node.recipe.steps):
        return False
    return not any(_is_product(name) or "sdpa" in name for name in (step.op_names[read] for read in node.reads))
