"""Question h: the published setting of adaptive memory optimization, GPT slices on 64 GB Ascend 910B devices.

What: three configurations of a GPT with hidden size 12288 and sequences of 8192 (TP8 PP1, TP2 PP4, TP2 PP4 VPP2, 8
layers in all), for which MindSpeed's documentation gives the gain of its adaptive memory optimization over full
recompute: 13.68, 14.74 (printed as 14.17) and 14.65 %. Here the same slices are planned by lowtide's solver and played
on its timeline; the gain over full recompute stands beside the published one and beside the ceiling, which is the gain
when nothing is recomputed at all.

    python -m benchmarks.published_setting                  # on the timeline: any machine, seconds
    python -m benchmarks.published_setting --device cuda    # a slice of TP8 for real, see published_run.py

The first is arithmetic, not a measurement: rates are those of the hardware file, communication of tensor parallelism is
left out on both sides, and the pipeline is 1F1B with uniform hand-over. Not covered: the published system itself, which
needs devices that are not here; its gain is quoted.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published_run import TITLE
from benchmarks.record import Record, versions
from benchmarks.rows import Row, command_of, run
from benchmarks.rows import parser as make_parser
from lowtide.core.fate import Fate
from lowtide.planner.solve import solve
from lowtide.timeline.hardware import Hardware, load_hardware
from lowtide.timeline.step import Item, Step, Tick

TIMELINE = "timeline"
HIDDEN, SEQUENCE, VOCABULARY, LAYERS = 12288, 8192, 50304, 8
DEVICE_BYTES = 64 * 10**9
RESERVED_BYTES = 4 * 10**9
"""Left to the runtime, communication buffers and fragmentation."""
STATE_BYTES_PER_PARAMETER = 18
"""bf16 weights, fp32 gradients, fp32 master weights and two moments."""
MIXED = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the published table."""

    name: str
    tensor_ranks: int
    stages: int
    micro_batch: int
    num_micro_batches: int
    published_percent: float
    is_sequence_parallel: bool = True

    @property
    def layers_per_stage(self) -> int:
        return LAYERS // self.stages


SETTINGS = tuple(
    dataclasses.replace(setting, name=f"{setting.name}{'' if parallel else ', no sequence parallel'}",
                        is_sequence_parallel=parallel)
    for parallel in (True, False)
    for setting in (
        Setting(name="TP8 PP1", tensor_ranks=8, stages=1, micro_batch=10, num_micro_batches=4, published_percent=13.68),
        Setting(name="TP2 PP4", tensor_ranks=2, stages=4, micro_batch=3, num_micro_batches=3, published_percent=14.74),
        Setting(
            name="TP2 PP4 VPP2", tensor_ranks=2, stages=4, micro_batch=2, num_micro_batches=4, published_percent=14.65
        ),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Op:
    """One operator of a layer: its forward time, how much longer its backward takes, what it reads and makes."""

    name: str
    seconds: float
    backward: float
    reads: tuple[str, ...]
    makes: tuple[str, ...]


class Layer:
    """Operators and saved activations of one transformer layer on one device. Bytes and seconds."""

    def __init__(self, setting: Setting, hardware: Hardware) -> None:
        tokens, ranks = setting.micro_batch * SEQUENCE, setting.tensor_ranks
        split = ranks if setting.is_sequence_parallel else 1
        whole, part = 2 * tokens * HIDDEN // split, 2 * tokens * HIDDEN // ranks
        self.nbytes = {"x1": whole, "n1": whole, "x2": whole, "n2": whole}
        self.nbytes |= {"q": part, "k": part, "v": part, "a": part, "h": 4 * part, "g": 4 * part}

        def product(columns: int) -> float:
            return hardware.op_seconds(2.0 * tokens * HIDDEN * columns / ranks, 0, "bfloat16")

        def traffic(nbytes: int) -> float:
            return hardware.op_seconds(0, nbytes, "bfloat16")

        # Causal attention: half of 2 products of (S x S) with the hidden size.
        flash = hardware.op_seconds(2.0 * tokens * SEQUENCE * HIDDEN / ranks, 0, "bfloat16", is_attention=True)
        self.ops = (
            _Op("norm1", traffic(2 * whole), 2, ("x1",), ("n1",)),
            _Op("qkv", product(3 * HIDDEN), 2, ("n1",), ("q", "k", "v")),
            _Op("attention", flash, 2.5, ("q", "k", "v"), ("a",)),
            _Op("projection", product(HIDDEN), 2, ("a",), ("x2",)),
            _Op("norm2", traffic(2 * whole), 2, ("x2",), ("n2",)),
            _Op("up", product(4 * HIDDEN), 2, ("n2",), ("h",)),
            _Op("gelu", traffic(8 * part), 2, ("h",), ("g",)),
            _Op("down", product(4 * HIDDEN), 2, ("g",), ()),
        )
        # What makes it again, from what, and the share of the operator's time (q, k and v are made one by one).
        self.recipes = {
            "n1": (self.ops[0].seconds, ("x1",)),
            "q": (self.ops[1].seconds / 3, ("n1",)),
            "k": (self.ops[1].seconds / 3, ("n1",)),
            "v": (self.ops[1].seconds / 3, ("n1",)),
            "a": (self.ops[2].seconds, ("q", "k", "v")),
            "x2": (self.ops[3].seconds, ("x1", "a")),
            "n2": (self.ops[4].seconds, ("x2",)),
            "h": (self.ops[5].seconds, ("n2",)),
            "g": (self.ops[6].seconds, ("h",)),
        }
        self.temporary_bytes = 3 * self.nbytes["g"] + 2 * whole

    @property
    def forward_seconds(self) -> float:
        return sum(op.seconds for op in self.ops)


def parameters(setting: Setting, stage: int) -> float:
    """Parameters of one device of a stage."""
    embedding = VOCABULARY * HIDDEN if stage in (0, setting.stages - 1) else 0
    return (setting.layers_per_stage * 12 * HIDDEN**2 + embedding) / setting.tensor_ranks


def head(setting: Setting, hardware: Hardware) -> tuple[float, int]:
    """Forward seconds of the last stage's output layer, and the bytes of its logits (bf16, and fp32 in the loss)."""
    tokens = setting.micro_batch * SEQUENCE
    seconds = hardware.op_seconds(2.0 * tokens * HIDDEN * VOCABULARY / setting.tensor_ranks, 0, "bfloat16")
    return seconds, 6 * tokens * VOCABULARY // setting.tensor_ranks


def stage_step(setting: Setting, stage: int, hardware: Hardware) -> tuple[Step, Layer, int]:
    """One stage's micro-batches in flight: all forwards, then all backwards. With its layer, and how many they are."""
    layer = Layer(setting, hardware)
    in_flight = 1 if setting.stages == 1 else min(setting.stages - stage, setting.num_micro_batches)
    if "VPP" in setting.name:  # the warm-up of the interleaved schedule holds all of these few micro-batches
        in_flight = setting.num_micro_batches if stage < setting.stages - 1 else setting.num_micro_batches - 1
    static = int(STATE_BYTES_PER_PARAMETER * parameters(setting, stage))
    blocks = [(batch, index) for batch in range(in_flight) for index in range(setting.layers_per_stage)]
    head_seconds, head_bytes = head(setting, hardware) if stage == setting.stages - 1 else (0.0, 0)
    return _Builder(layer, static).build(blocks, setting.layers_per_stage, head_seconds, head_bytes), layer, in_flight


class _Builder:
    """Ticks and items of a stage."""

    def __init__(self, layer: Layer, static_bytes: int) -> None:
        self.layer = layer
        self.base = static_bytes + layer.temporary_bytes
        self.ticks: list[Tick] = []
        self.born: dict[tuple, int] = {}
        self.saved: dict[tuple, int] = {}
        self.dies: dict[tuple, int] = {}
        self.reads: dict[tuple, list[int]] = {}

    def build(self, blocks: list[tuple[int, int]], num_layers: int, head_seconds: float, head_bytes: int) -> Step:
        for block in blocks:
            self._forward(block)
        num_forward = len(self.ticks)
        # The oldest micro-batch comes back first; its layers in reverse.
        for batch in dict.fromkeys(batch for batch, _ in blocks):
            if head_seconds:
                self.ticks.append(Tick(seconds=3 * head_seconds, base_bytes=self.base + head_bytes))
            for index in reversed(range(num_layers)):
                self._backward((batch, index))
        return Step(ticks=tuple(self.ticks), num_forward_ticks=num_forward, items=self._items())

    def _forward(self, block: tuple[int, int]) -> None:
        start = len(self.ticks)
        self.born[*block, "x1"] = max(start - 1, 0)
        for offset, op in enumerate(self.layer.ops):
            for name in op.makes:
                self.born[*block, name] = start + offset
            for name in (*op.reads, *self._own_outputs(op)):
                self.saved.setdefault((*block, name), start + offset)
                self.dies[*block, name] = start + offset + 1
            self.ticks.append(Tick(seconds=op.seconds, base_bytes=self.base))
        self.dies[*block, "x1"] = start + 4  # added again after attention
        self.dies[*block, "x2"] = start + 8  # and after the second half

    def _backward(self, block: tuple[int, int]) -> None:
        for op in reversed(self.layer.ops):
            for name in (*op.reads, *self._own_outputs(op)):
                self.reads.setdefault((*block, name), []).append(len(self.ticks))
            self.ticks.append(Tick(seconds=op.seconds * op.backward, base_bytes=self.base))

    @staticmethod
    def _own_outputs(op: _Op) -> tuple[str, ...]:
        """Attention saves its result too."""
        return op.makes if op.name == "attention" else ()

    def _items(self) -> tuple[Item, ...]:
        keys = sorted(self.born, key=lambda key: (self.saved[key], self.born[key]))
        place = {key: index for index, key in enumerate(keys)}
        items = []
        for key in keys:
            *block, name = key
            seconds, inputs = self.layer.recipes.get(name, (0.0, ()))
            items.append(
                Item(
                    name=f"batch {block[0]} layer {block[1]} {name}",
                    nbytes=self.layer.nbytes[name],
                    born=self.born[key],
                    saved=self.saved[key],
                    dies=self.dies[key],
                    reads=tuple(sorted(self.reads[key])),
                    release=max(self.reads[key]) + 1,
                    fates=MIXED if inputs else (Fate.KEEP, Fate.SWAP),
                    recipe_seconds=seconds,
                    inputs=tuple(place[*block, source] for source in inputs),
                )
            )
        return tuple(items)


def run_setting(setting: Setting, hardware: Hardware) -> Row:
    """Gain over full recompute of the ceiling and of lowtide's plan, percent."""
    times: dict[str, list[float]] = {"plain": [], "full recompute": [], "planned": []}
    gaps, peaks, swapped = [], [], []
    for stage in range(setting.stages):
        step, layer, in_flight = stage_step(setting, stage, hardware)
        solution = solve(step, hardware.link, DEVICE_BYTES - RESERVED_BYTES)
        again = setting.layers_per_stage * layer.forward_seconds
        times["plain"].append(step.compute_seconds / in_flight)
        times["full recompute"].append(step.compute_seconds / in_flight + again)
        times["planned"].append(solution.timeline.step_seconds / in_flight)
        gaps.append(solution.gap)
        peaks.append(solution.timeline.peak_bytes)
        swapped.append(solution.timeline.slower_bytes)
    total = {name: _pipeline_seconds(setting, stages) for name, stages in times.items()}
    return {
        "published_gain_percent": setting.published_percent,
        "planned_gain_percent": round(100 * (total["full recompute"] / total["planned"] - 1), 2),
        "ceiling_gain_percent": round(100 * (total["full recompute"] / total["plain"] - 1), 2),
        "gap_percent": round(100 * max(gaps), 3),
        "full_recompute_seconds": round(total["full recompute"], 4),
        "planned_seconds": round(total["planned"], 4),
        "ceiling_seconds": round(total["plain"], 4),
        "stage_peak_bytes": peaks,
        "stage_swapped_bytes": swapped,
    }


def _pipeline_seconds(setting: Setting, stage_seconds: list[float]) -> float:
    """1F1B: one micro-batch runs through all stages, the others follow at the pace of the slowest. With two chunks a
    stage the fill and drain take half as long."""
    chunks = 2 if "VPP" in setting.name else 1
    fill = sum(stage_seconds) - max(stage_seconds)
    return fill / chunks + setting.num_micro_batches * max(stage_seconds)


def main(argv: Sequence[str]) -> int:
    from benchmarks import published_run

    options = make_parser("published_setting", __doc__, device=TIMELINE)
    published_run.add_arguments(options)
    args = options.parse_args(argv)
    command = command_of("published_setting", argv)
    if args.device != TIMELINE:
        return published_run.main(args, command)
    hardware = load_hardware("ascend910b")
    settings = {setting.name: setting for setting in SETTINGS}
    record = Record(
        question="published_setting",
        title=TITLE,
        kind="computed",
        command=command,
        settings={"hidden": HIDDEN, "sequence": SEQUENCE, "layers": LAYERS, "device_bytes": DEVICE_BYTES,
                  "reserved_bytes": RESERVED_BYTES, "state_bytes_per_parameter": STATE_BYTES_PER_PARAMETER},
        rows=[],
        notes=[
            "Nothing ran. The solver's plan is played on the timeline; rates are those of the hardware file "
            "`ascend910b.toml`, where each has its source; most are assumed.",
            "All percentages are gains over full recompute. The ceiling is the gain when nothing is recomputed and "
            "nothing is swapped; no plan can gain more.",
            "Communication of tensor parallelism is left out on both sides, and the pipeline is 1F1B with uniform "
            "hand-over. The published gain compares 8 layers with 3 in its first row, as its documentation says.",
        ],
        hardware={"folder": TIMELINE, "name": "Ascend 910B, 64 GB, by roofline"},
        versions={key: value for key, value in versions().items() if key in ("python", "lowtide", "numpy", "scipy")},
    )  # fmt: skip
    pieces = [{"setting": name} for name in settings]
    return run(record, pieces, lambda piece: run_setting(settings[piece["setting"]], hardware), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
