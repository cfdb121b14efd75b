"""Question g: how long does planning take, and how much memory, as models grow to 671 B parameters?

    python -m benchmarks.planning_time [--tokens 4096] [--hardware h200] [--models NAME ...]

Each model is built without weights, traced with fake tensors, and planned for a budget half-way between the floor and
the plain peak, in a process of its own. Reported: seconds of the trace and of the solver, resident memory at rest
(torch and transformers imported) and at its highest, operators and storages, and how far from optimal the plan may be.

The numbers are of the planner on this machine's CPU; nothing of the model runs, and `--hardware` only says whose
roofline gives the times in the plan. One sequence in bf16, gradients accumulated, the optimizer's
state elsewhere; the whole model is planned for one device, which is what makes it large: a rank's slice is smaller.

Cost: a minute or two. Not covered: imports (about three seconds), other budgets, and plans that the adaptive runtime
makes from observed steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Record, hardware
from benchmarks.rows import Row, command_of, parser, run

MODELS = ("gpt2_124m", "llama_1b", "llama_8b", "llama_70b", "mixtral_8x22b", "llama_405b", "deepseek_v3_671b")
TINY = "tiny"
"""Not part of the question: for tests."""
_LLAMAS = {
    TINY: (64, 176, 2, 2, 2, 256),
    "llama_1b": (2048, 8192, 16, 32, 8, 128256),
    "llama_8b": (4096, 14336, 32, 32, 8, 128256),
    "llama_70b": (8192, 28672, 80, 64, 8, 128256),
    "llama_405b": (16384, 53248, 126, 128, 8, 128256),
}
_TIME_LIMIT_SECONDS = 900


def config_of(name: str, tokens: int) -> Any:
    """The configuration that transformers builds the model from. Sizes are those of the published models."""
    from transformers import DeepseekV3Config, GPT2Config, LlamaConfig, MixtralConfig

    if name in _LLAMAS:
        hidden, intermediate, layers, heads, kv_heads, vocab = _LLAMAS[name]
        return LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocab, use_cache=False,
        )  # fmt: skip
    if name == "gpt2_124m":
        return GPT2Config(n_positions=tokens, use_cache=False)
    if name == "mixtral_8x22b":
        return MixtralConfig(
            hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
            num_key_value_heads=8, vocab_size=32768, use_cache=False,
        )  # fmt: skip
    assert name == "deepseek_v3_671b", name
    return DeepseekV3Config(use_cache=False)


def plan_once(name: str, tokens: int, hardware_name: str) -> Row:
    """Trace and plan in this process."""
    from benchmarks.traced import trace_config
    from lowtide.config.memory import load_memory
    from lowtide.planner.by_rules import problem_of
    from lowtide.planner.plan_profile import plan_profile
    from lowtide.planner.solve import floor
    from lowtide.timeline.hardware import load_hardware
    from lowtide.timeline.memory import plain_curve

    device = load_hardware(hardware_name)
    config = config_of(name, tokens)
    rest_bytes = _peak_resident_bytes()
    started = time.perf_counter()
    profile = trace_config(config, tokens=tokens, hardware=device)
    trace_seconds = time.perf_counter() - started
    # As from the second micro-batch on: else the gradients made at the end of the step are the peak, and no plan helps.
    problem = problem_of(profile, load_memory({"budget": 1}), has_gradients=True)
    floor_bytes, plain_bytes = floor(problem.step)[0], int(plain_curve(problem.step).max())
    budget = (floor_bytes + plain_bytes) // 2
    started = time.perf_counter()
    plan = plan_profile(
        profile, load_memory({"budget": budget}), link=device.link, has_gradients=True, time_limit_seconds=60.0
    )
    solve_seconds = time.perf_counter() - started
    assert plan.predicted is not None
    return {
        "num_parameters": profile.state.parameters // 2,
        "num_layers": len(profile.layers),
        "num_operators": len(profile.op_names),
        "num_sites": len(profile.sites),
        "trace_seconds": trace_seconds,
        "solve_seconds": solve_seconds,
        "peak_resident_bytes": _peak_resident_bytes(),
        "rest_resident_bytes": rest_bytes,
        "plain_peak_bytes": plain_bytes,
        "floor_bytes": floor_bytes,
        "budget_bytes": budget,
        "predicted_ratio": plan.predicted.step_seconds / plan.predicted.plain_seconds,
        "gap_percent": 100 * plan.predicted.gap,
    }


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(piece: Mapping[str, Any], args: argparse.Namespace) -> Row:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.planning_time", "--child", str(piece["model"])]
    done = subprocess.run(
        [*command, f"--tokens={args.tokens}", f"--hardware={args.hardware}"],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
        raise RuntimeError(lines[-1])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str]) -> int:
    options = parser("planning_time", __doc__)
    options.add_argument("--child", help=argparse.SUPPRESS)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=(*MODELS, TINY), metavar="NAME")
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--hardware", default="h200", help="whose roofline gives the times in the plans")
    args = options.parse_args(argv)
    if args.child is not None:
        print(json.dumps(plan_once(args.child, args.tokens, args.hardware)))
        return 0
    record = Record(
        question="planning_time",
        title="How long does planning take as models grow?",
        kind="measured",
        command=command_of("planning_time", argv),
        settings={"tokens": args.tokens, "samples": 1, "dtype": "bfloat16", "has_gradients": True,
                  "times_of": args.hardware},
        rows=[],
        notes=[
            "Seconds are the planner's on this machine's CPU, after imports. The plans are for the roofline of "
            f"{args.hardware}, and for a whole model on one device; nothing of it runs.",
            "Of layers that are equal three are traced and the rest copied, so the trace grows with the kinds of "
            "layers and the solver with their number.",
        ],
        hardware=hardware("cpu"),
    )  # fmt: skip
    return run(record, [{"model": model} for model in args.models], lambda piece: measure(piece, args), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
