"""Question d: are a plan's peak and step time what it says they are?

    python -m benchmarks.predicted [--plans 8] [--rounds 6] [--device cuda --dtype bfloat16 --hidden 2048 ...]

Each of three models is observed once, on a CPU in two sizes: with short steps and, twice as wide and with twice the
batch, with steps above 100 ms. Then come random plans: half of them are the solver's for a random budget between
the floor and the plain peak, half are random fates, one drawn for each layer. Each is carried out by the runtime beside
a copy of the model without one: in turns of two steps, of which the first is not counted;
each turn begins with the heap given back, or the plain step would pay for what the planned one left. Compared are

- the peak: the plan's, and that of a step in which every live byte is counted (on an accelerator: the allocator's own);
- the step time as a multiple of plain's: predicted by the plan, from what was known before anything ran under
  one, and the median over rounds.

A shared CPU is noisy, so the order counts too: Kendall's tau between predicted and measured times over the plans of a
model, and between measurements of odd and of even rounds, which is what a perfect prediction could reach. Loss and
gradients are compared to the bit after the last round.

Cost: some ten minutes on two cores. Not covered: several ranks, and steps with an optimizer in them.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.record import Record, hardware
from benchmarks.rows import Row, command_of, parser, run
from benchmarks.steps import allocated_bytes, peak_bytes_of, timed

if TYPE_CHECKING:
    import argparse

    import lowtide

MODELS = ("llama", "gpt2", "qwen3_moe")
_DEFAULTS = {
    "batch": (2, 4),
    "hidden": (256, 2048),
    "sequence": (256, 2048),
    "dtype": ("float32", "bfloat16"),
    "min_bytes": (2**16, 2**20),
}
_SIZES = ("hidden", "layers", "sequence", "batch", "dtype", "min_bytes")


class Subject:
    """A model under plans, a plain copy beside it, and what was observed of a step."""

    def __init__(self, name: str, args: argparse.Namespace, scale: int = 1) -> None:
        """`scale` times as wide as `args` say, and with `scale` times the batch."""
        import torch

        import lowtide
        from lowtide.engines.tiers.host_buffers import configure_malloc

        self.scale = scale
        self.device = torch.device(args.device)
        if self.device.type == "cpu":
            configure_malloc()
        torch.manual_seed(args.seed)
        self.min_bytes = args.min_bytes
        self.plain = _make(name, args, scale).to(self.device, getattr(torch, args.dtype)).train()
        self.ids = torch.randint(256, (scale * args.batch, args.sequence), device=self.device)
        self.other_bytes = allocated_bytes(self.device)
        self.planned = copy.deepcopy(self.plain)
        self.profile = lowtide.observe(self.planned, {"input_ids": self.ids, "labels": self.ids})

    def loss(self, model: Any) -> Any:
        import torch

        torch.manual_seed(7)
        return model(input_ids=self.ids, labels=self.ids).loss

    def turn(self, model: Any, engine: Any) -> float:
        """Seconds of the second of two steps, after the heap was given back."""
        engine.forget_free_memory()
        self.step(model)
        return self.step(model)

    def step(self, model: Any) -> float:
        """Seconds of one forward and backward."""
        model.zero_grad(set_to_none=True)
        return timed(lambda: self.loss(model).backward(), self.device)

    def peak_bytes(self, tide: Any) -> int:
        """Of one planned step, with nothing left from an earlier one."""
        for model in (self.plain, self.planned):
            model.zero_grad(set_to_none=True)
        tide.settle()
        return peak_bytes_of(lambda: self.loss(self.planned).backward(), self.planned, tide) - self.other_bytes

    def is_equal(self) -> bool:
        """Loss and gradients of one step of each, to the bit."""
        import torch

        losses = []
        for model in (self.plain, self.planned):
            model.zero_grad(set_to_none=True)
            loss = self.loss(model)
            loss.backward()
            losses.append(loss.detach())
        pairs = zip(self.plain.parameters(), self.planned.parameters(), strict=True)
        return torch.equal(*losses) and all(_same(ours.grad, theirs.grad) for ours, theirs in pairs)


def _same(ours: Any, theirs: Any) -> bool:
    import torch

    return ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)


def _make(name: str, args: argparse.Namespace, scale: int) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

    hidden = scale * args.hidden
    heads = max(hidden // 64, 2)
    sizes = {"vocab_size": 256, "hidden_size": hidden, "num_hidden_layers": args.layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "use_cache": False}
    if name == "llama":
        config: Any = LlamaConfig(**sizes, intermediate_size=hidden * 8 // 3)
    elif name == "gpt2":
        config = GPT2Config(
            vocab_size=256, n_embd=hidden, n_layer=args.layers, n_head=heads, n_positions=args.sequence,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
    else:
        config = Qwen3MoeConfig(
            **sizes, intermediate_size=hidden * 2, moe_intermediate_size=hidden, num_experts=4,
            num_experts_per_tok=2, head_dim=hidden // heads,
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


# -- plans -------------------------------------------------------------------------------------------------------------


def draw_plan(subject: Subject, link: Any, seed: str, is_by_budget: bool) -> tuple[lowtide.Plan, str]:
    """A random plan, and how it came about. Even draws are the solver's, odd ones random fates."""
    from lowtide.config.memory import load_memory
    from lowtide.planner.by_rules import HOST_COSTS, problem_of
    from lowtide.planner.plan_profile import plan_profile
    from lowtide.planner.solve import floor
    from lowtide.timeline.memory import plain_curve

    draw = random.Random(seed)
    free = {"budget": 1, "min_bytes": subject.min_bytes}
    problem = problem_of(subject.profile, load_memory(free))
    plain_bytes = int(plain_curve(problem.step).max())
    if is_by_budget:
        floor_bytes = floor(problem.step)[0]
        memory: dict[str, Any] = free | {"budget": draw.randint(floor_bytes, plain_bytes)}
        how = f"budget {(memory['budget'] - floor_bytes) / max(plain_bytes - floor_bytes, 1):.0%} of floor to plain"
    else:
        fates = {layer: draw.choice(("keep", "swap", "recompute")) for layer in subject.profile.layers}
        rules = {fate: [layer for layer in fates if fates[layer] == fate] for fate in ("keep", "swap", "recompute")}
        memory = free | {"budget": 2 * plain_bytes, **{fate: names for fate, names in rules.items() if names}}
        how = "fates " + " ".join(fates.values())
    prices: dict[str, Any] = {"link": link, "costs": HOST_COSTS}  # as for `lowtide.optimize`
    return plan_profile(subject.profile, load_memory(memory), **prices, time_limit_seconds=2.0), how


def measure_plan(subject: Subject, plan: lowtide.Plan, rounds: int) -> Row:
    """What the plan says beside what it does."""
    import lowtide

    assert plan.predicted is not None
    seconds: dict[str, list[float]] = {"plain": [], "planned": []}
    with lowtide.apply(subject.planned, plan) as tide:
        for model in (subject.plain, subject.planned, subject.planned):  # the first planned step is recorded
            subject.step(model)
        tide.reset_stats()
        for _ in range(rounds):
            seconds["plain"].append(subject.turn(subject.plain, tide.engine))
            seconds["planned"].append(subject.turn(subject.planned, tide.engine))
        stats = tide.stats
        is_equal = subject.is_equal()
        peak_bytes = subject.peak_bytes(tide)
    ratios = [ours / theirs for ours, theirs in zip(seconds["planned"], seconds["plain"], strict=True)]
    said = plan.predicted
    return {
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "predicted_ratio": said.pass_seconds / said.plain_seconds,
        "ratio_of_odd_rounds": statistics.median(ratios[::2]),
        "ratio_of_even_rounds": statistics.median(ratios[1::2] or ratios),
        "peak_bytes": peak_bytes,
        "predicted_peak_bytes": said.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "seconds_median": statistics.median(seconds["planned"]),
        "predicted_seconds": said.pass_seconds,
        "plain_seconds": statistics.median(seconds["plain"]),
        "stall_seconds": stats.stall_seconds / stats.num_forwards,
        "predicted_stall_seconds": said.stall_seconds,
        "swapped_bytes": stats.swapped_bytes // stats.num_forwards,
        "recomputed_bytes": stats.recomputed_bytes // stats.num_forwards,
        "is_equal": is_equal,
    }


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    options = parser("predicted", __doc__)
    options.add_argument("--plans", type=int, default=8, help="of each model")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--scales", type=int, nargs="+", help="times hidden and batch; 1 2 on a CPU, else 1")
    options.add_argument("--hidden", type=int, help="256 on a CPU, else 2048")
    options.add_argument("--sequence", type=int, help="256 on a CPU, else 2048")
    options.add_argument("--batch", type=int, help="2 on a CPU, else 4")
    options.add_argument("--dtype", help="float32 on a CPU, else bfloat16")
    options.add_argument("--min-bytes", type=int, help="65536 on a CPU, else 1048576")
    options.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as it takes")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    for key, (on_host, elsewhere) in _DEFAULTS.items():
        if getattr(args, key) is None:
            setattr(args, key, on_host if args.device == "cpu" else elsewhere)
    settings = {key: getattr(args, key) for key in (*_SIZES, "scales", "plans", "rounds", "seed")}
    if args.scales is None:
        args.scales = [1, 2] if args.device == "cpu" else [1]
    record = Record(
        question="predicted",
        title="Are peak and step time as predicted, over random plans and budgets?",
        kind="measured",
        command=command_of("predicted", argv),
        settings={**settings, "threads": _threads(args.threads)},
        rows=[],
        notes=[
            "Peaks on a CPU are counted byte by byte in a step of their own; on an accelerator they are the "
            "allocator's.",
            "Times are multiples of a plain step, in turns with which each planned step ran; each turn begins with the "
            "heap given back, and its first step is not counted. `time error` is that of the plan. "
            "`scale` is times hidden and batch.",
            "`tau` is the agreement of the "
            "predicted with the measured order, `tau of clear pairs` the same for pairs predicted to be a twentieth of "
            "a plain step apart or more; `tau of measured with itself` is that of odd with even rounds: more than this "
            "cannot be expected on this machine. Free of noise, on a clock, the same is asked by "
            "`tests/test_virtual_clock.py`.",
        ],
        hardware=hardware(args.device),
    )
    draws = range(args.plans)
    pieces = [{"model": m, "scale": scale, "draw": draw} for scale in args.scales for m in MODELS for draw in draws]
    return run(record, pieces, _measurer(args), args)


def _threads(wanted: int) -> int:
    import torch

    if wanted:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def _measurer(args: argparse.Namespace) -> Callable[[Mapping[str, Any]], Row]:
    """Makes each model once, when the first of its pieces comes, and lets go of the one before."""
    subjects: dict[str, Subject] = {}
    links: list[Any] = []

    def measure(piece: Mapping[str, Any]) -> Row:
        name, scale, draw = piece["model"], piece["scale"], piece["draw"]
        subject = subjects.get(name)
        if subject is None or subject.scale != scale:
            subjects.clear()
            subject = subjects[name] = Subject(name, args, scale)
        if not links:
            links.append(_link(subject))
        plan, how = draw_plan(subject, links[0], f"{args.seed} {name} {draw}", is_by_budget=draw % 2 == 0)
        return {"plan": how, **measure_plan(subject, plan, args.rounds)}

    return measure


def _link(subject: Subject) -> Any:
    """Measured under load, on an engine of the kind that carries the plans out."""
    import lowtide
    from lowtide.engines.bandwidth import measure_link

    with lowtide.apply(subject.planned, {}) as tide:
        return measure_link(tide.engine, subject.device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
