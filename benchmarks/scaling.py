"""Question i: DeepSeek-V3 from 1 to 16,384 devices, by timeline and formulas.

    python -m benchmarks.scaling [--hardware h100] [--sequences 15360]

For each number of devices a layout (pipeline stages x expert ranks x data ranks; no tensor parallelism, as published)
is given. What one device then has of the model, the layers of a stage with its share of the experts, is traced, and
planned for what is left of the device's memory to one of the micro-batches in flight. Nothing runs. From where:

- compute, recompute, copies and their stalls, and memory: the trace by roofline, lowtide's solver and its timeline;
- the bubble: (stages - 1) micro-batches, the formula of 1F1B with equal stages;
- network: alpha-beta, messages x latency + bytes / bandwidth, with the rates of `NETWORK`. The timeline has no network
  lane, so two bounds are given: nothing of it hidden behind compute, and all of it hidden that compute is long enough
  for;
- the batch is the same whatever the devices (strong scaling), 15,360 sequences of 4,096 tokens as published.

Cost: a minute. Not covered: embedding, head and multi-token prediction (a stage is layers alone, and all layers have
experts), uneven routing, FP8, failures, and the choice of a better layout than the given one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.record import Record, versions
from benchmarks.rows import Row, command_of, parser, run
from lowtide.core.fate import Fate

if TYPE_CHECKING:
    from lowtide.core.profile import Profile
    from lowtide.timeline.hardware import Hardware

PAPER = "DeepSeek-V3 Technical Report, arXiv 2412.19437"
LAYERS, EXPERTS, TOP_K, NODE_LIMIT = 61, 256, 8, 4
STAGES, EXPERT_RANKS, NODE = 16, 32, 8
NETWORK: dict[str, tuple[float, str]] = {
    "node_bytes_per_second": (160e9, f"published: NVLink of the H800, {PAPER}, section 3.2.2"),
    "network_bytes_per_second": (50e9, f"published: InfiniBand of one device, {PAPER}, section 3.2.2"),
    "message_seconds": (1e-5, "assumed: start of a message between two devices"),
}
GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 8
"""A parameter: fp32 gradients; fp32 master weights and two bf16 moments, the latter three sharded over data ranks."""
RESERVED_SHARE = 0.08
"""Of the device, left to libraries, communication buffers and fragmentation."""
_PRECISE_BYTES = 2**28
DEVICES = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is cut. `data` ranks hold the same layers; `experts` of them share the experts."""

    devices: int
    stages: int
    experts: int
    data: int

    @property
    def layers(self) -> int:
        """Of the fullest stage."""
        return -(-LAYERS // self.stages)


def layout_of(devices: int) -> Layout:
    """As many stages as there are devices, up to 16; then as many expert ranks as there are data ranks, up to 32: with
    more, a device would have fewer experts than each token takes, and the slice could not be traced as it is."""
    stages = min(devices, STAGES)
    data = devices // stages
    return Layout(devices=devices, stages=stages, experts=min(data, EXPERT_RANKS), data=data)


@functools.cache
def trace_stage(layers: int, local_experts: int, tokens: int, hardware_name: str) -> Profile:
    """Forward and backward of one micro-batch of one sequence through a stage. Each local expert sees what it would see
    of all expert ranks' tokens together, on average: with `TOP_K` of the local ones a token has as much work."""
    import torch

    from lowtide.profiling.fake.trace import trace_config
    from lowtide.timeline.hardware import load_hardware

    def build() -> Any:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Model

        config = DeepseekV3Config(
            vocab_size=8, num_hidden_layers=layers, first_k_dense_replace=0, n_routed_experts=local_experts,
            num_experts_per_tok=TOP_K, n_group=1, topk_group=1, use_cache=False, pad_token_id=None,
        )  # fmt: skip
        return DeepseekV3Model(config)

    hidden = torch.empty(1, tokens, 7168, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return trace_config(
        build,
        tokens=tokens,
        hardware=load_hardware(hardware_name),
        batch={"inputs_embeds": hidden},
        loss=lambda output: output.last_hidden_state.sum(),
    )


def run_layout(layout: Layout, hardware_name: str, tokens: int, sequences: int) -> Row:
    """The row of one number of devices."""
    from lowtide.timeline.hardware import load_hardware
    from lowtide.units import format_bytes

    hardware = load_hardware(hardware_name)
    head: Row = {"stages": layout.stages, "expert_ranks": layout.experts, "data_ranks": layout.data}
    profile = trace_stage(layout.layers, EXPERTS // layout.experts, tokens, hardware_name)
    num_micro_batches = sequences // layout.data
    in_flight = min(layout.stages, num_micro_batches)
    static_bytes = _static_bytes(profile, layout)
    room_bytes = int(hardware.memory_bytes * (1 - RESERVED_SHARE)) - static_bytes
    head |= {"num_micro_batches": num_micro_batches, "num_in_flight": in_flight, "state_bytes": static_bytes}
    if room_bytes <= 0:
        return {**head, "outcome": "does not fit: its state alone is larger than the device"}
    facts = plan_stage(profile, room_bytes, in_flight, hardware)
    if facts is None:
        return {**head, "outcome": f"does not fit: no plan holds {in_flight} micro-batches in "
                f"{format_bytes(room_bytes)} beside the state"}  # fmt: skip
    times = step_times(layout, profile, facts["stage_seconds"], num_micro_batches, tokens)
    tokens_of_device = sequences * tokens / layout.devices
    return {
        **head,
        "outcome": "fits",
        **facts,
        **times,
        "tokens_per_second_hidden": tokens_of_device / times["step_hidden_seconds"],
        "tokens_per_second_exposed": tokens_of_device / times["step_exposed_seconds"],
    }


def _traced_state_bytes(profile: Profile) -> int:
    from lowtide.planner.problem import state_bytes

    return state_bytes(profile, has_gradients=True)


def _num_parameters(profile: Profile, layout: Layout) -> tuple[int, int]:
    """(all, of routed experts) on one device."""
    # Gate, up and down of each expert, hidden 7168 to 2048.
    routed = layout.layers * (EXPERTS // layout.experts) * 3 * 7168 * 2048
    return profile.state.parameters // 2, routed


def _static_bytes(profile: Profile, layout: Layout) -> int:
    """Weights, gradients and this rank's shard of the optimizer."""
    total, routed = _num_parameters(profile, layout)
    sharded = (total - routed) / layout.data + routed / (layout.data // layout.experts)
    return int((2 + GRADIENT_BYTES) * total + OPTIMIZER_BYTES * sharded)


def plan_stage(profile: Profile, room_bytes: int, in_flight: int, hardware: Hardware) -> Row | None:
    """The fastest plan under which one micro-batch at its worst moment and what the others hold fit into `room_bytes`.

    The budget of a micro-batch is found by halving: a larger one is taken to hold no less. None: nothing fits.
    """
    state = _traced_state_bytes(profile)
    low, high, best = 0, room_bytes, None
    budget = high
    while True:
        plan = _plan(profile, state + budget, hardware)
        if plan is None:
            low = budget
        elif plan.predicted.peak_bytes - state + (in_flight - 1) * _bytes_of(plan)[Fate.KEEP] <= room_bytes:
            best, low = plan, budget
        else:
            high = budget
        if high - low < _PRECISE_BYTES:
            return None if best is None else _facts(best, profile, in_flight)
        budget = (low + high) // 2


def _plan(profile: Profile, budget_bytes: int, hardware: Hardware) -> Any:
    from lowtide.config.memory import load_memory
    from lowtide.errors import BudgetError
    from lowtide.planner.plan_profile import plan_profile

    try:
        return plan_profile(profile, load_memory({"budget": budget_bytes}), link=hardware.link, has_gradients=True)
    except BudgetError:
        return None


def _bytes_of(plan: Any) -> dict[Fate, int]:
    """Of the activations of one micro-batch, by fate. What is kept is there between its forward and its backward."""
    nbytes = dict.fromkeys(Fate, 0)
    for decision in plan.sites:
        nbytes[decision.fate] += decision.nbytes
    return nbytes


def _facts(plan: Any, profile: Profile, in_flight: int) -> Row:
    said, nbytes = plan.predicted, _bytes_of(plan)
    forward_seconds = sum(profile.op_seconds[: profile.num_forward_ops])
    return {
        "ratio_median": said.step_seconds / said.plain_seconds,
        "gain_over_full_recompute_percent": 100 * ((said.plain_seconds + forward_seconds) / said.step_seconds - 1),
        "activation_bytes": in_flight * profile.saved_bytes,
        "kept_share": nbytes[Fate.KEEP] / profile.saved_bytes,
        "swapped_share": nbytes[Fate.SWAP] / profile.saved_bytes,
        "stage_seconds": said.step_seconds,
        "stage_stall_seconds": said.stall_seconds,
    }


def step_times(layout: Layout, profile: Profile, stage_seconds: float, num_micro_batches: int, tokens: int) -> Row:
    """Seconds of one optimizer step, by part, and the two bounds."""
    compute = num_micro_batches * stage_seconds
    bubble = (layout.stages - 1) * stage_seconds
    experts = num_micro_batches * layout.layers * 4 * all_to_all_seconds(layout.experts, tokens)
    hand_over = num_micro_batches * (2 * hand_over_seconds(tokens) if layout.stages > 1 else 0.0)
    total, routed = _num_parameters(profile, layout)
    reduce = ring_seconds(layout.data, total - routed) + ring_seconds(layout.data // layout.experts, routed)
    network = experts + hand_over + reduce
    return {
        "compute_seconds": compute,
        "bubble_seconds": bubble,
        "all_to_all_seconds": experts,
        "hand_over_seconds": hand_over,
        "reduce_seconds": reduce,
        "step_hidden_seconds": compute + bubble + max(0.0, network - compute),
        "step_exposed_seconds": compute + bubble + network,
    }


def all_to_all_seconds(ranks: int, tokens: int) -> float:
    """One dispatch (or combine) of `tokens` bf16 vectors to `TOP_K` experts over `ranks`: first over the network, to at
    most `NODE_LIMIT` nodes a token, then within the nodes; the two one after the other."""
    if ranks == 1:
        return 0.0
    vector_bytes = 2 * 7168
    nodes = max(1, ranks // NODE)
    across = tokens * vector_bytes * min(NODE_LIMIT, nodes) * (1 - 1 / nodes)
    within = tokens * vector_bytes * TOP_K * (1 - 1 / min(ranks, NODE))
    rates = {name: value for name, (value, _) in NETWORK.items()}
    messages = (ranks - 1) * rates["message_seconds"]
    return messages + across / rates["network_bytes_per_second"] + within / rates["node_bytes_per_second"]


def hand_over_seconds(tokens: int) -> float:
    """Activations of a micro-batch, in bf16, to the next stage."""
    return NETWORK["message_seconds"][0] + tokens * 2 * 7168 / NETWORK["network_bytes_per_second"][0]


def ring_seconds(ranks: int, num_parameters: int) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of bf16 weights around a ring of `ranks` devices."""
    nbytes = (GRADIENT_BYTES + 2) * num_parameters * (ranks - 1) / ranks
    return 2 * (ranks - 1) * NETWORK["message_seconds"][0] + nbytes / NETWORK["network_bytes_per_second"][0]


def main(argv: Sequence[str]) -> int:
    from lowtide.timeline.hardware import load_hardware

    options = parser("scaling", __doc__, device="timeline")
    options.add_argument("--hardware", default="h100")
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--sequences", type=int, default=15360, help="of one optimizer step, over all devices")
    options.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    args = options.parse_args(argv)
    device = load_hardware(args.hardware)
    link = device.link
    record = Record(
        question="scaling",
        title="How does DeepSeek-V3 scale from 1 to 16,384 devices?",
        kind="computed",
        command=command_of("scaling", argv),
        settings={"hardware": args.hardware, "tokens": args.tokens, "sequences": args.sequences, "micro_batch": 1,
                  "dtype": "bfloat16", "tensor_ranks": 1, "reserved_share": RESERVED_SHARE,
                  **{name: value for name, (value, _) in NETWORK.items()}},
        rows=[],
        notes=[
            "Nothing ran. Compute, copies and memory are the trace by roofline and lowtide's timeline for the plan of "
            "a stage; the bubble is (stages - 1) micro-batches, the formula of 1F1B with equal stages; network times "
            "are messages x latency + bytes / bandwidth. `hidden` is the bound at which all network time is hidden "
            "that compute is long enough for, `exposed` that at which none is.",
            f"Device: `{args.hardware}.toml`, link {link.out_bytes_per_second / 1e9:.0f} GB/s each way; its rates have "
            "their sources in the file, most are assumed shares of a vendor's peak. Network: "
            + "; ".join(f"`{name}` {value:g}, {source}" for name, (value, source) in NETWORK.items()) + ".",
            "Layouts are given, not searched: up to 16 stages, then up to 32 expert ranks, then data ranks; no tensor "
            "parallelism. A device has bf16 weights, fp32 gradients, and its shard of fp32 master weights and two bf16 "
            "moments. What is left holds one micro-batch at its worst moment and what the others in flight have kept.",
            "Left out: embedding, head, multi-token prediction, uneven routing, FP8. The first three layers, which "
            "have no experts, count like the others.",
            f"Published for 2,048 H800, in FP8: 180,000 device hours a trillion tokens, which is 1,543 tokens a second "
            f"and device ({PAPER}, section 1).",
        ],
        hardware={"folder": "timeline", "name": f"{args.hardware.upper()}, {device.memory_bytes / 1e9:.0f} GB, "
                  "by roofline"},
        versions={key: value for key, value in versions().items() if key != "numpy"},
    )  # fmt: skip
    pieces = [{"num_devices": devices} for devices in args.devices]

    def measure(piece: Mapping[str, Any]) -> Row:
        return run_layout(layout_of(piece["num_devices"]), args.hardware, args.tokens, args.sequences)

    return run(record, pieces, measure, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
