"""A profile made of round numbers: a small decoder, layer after layer, with a head that nobody can move.

Each layer has a retained input (its bf16 input), a norm that can be made from it, attention without a recipe, two
matrix products, and `silu` and `mul` that can be made from these.
"""

from __future__ import annotations

from lowtide.core.profile import HiddenBytes, Profile, Site, StateBytes
from lowtide.core.recipe import Geometry, Recipe, RecipeInput, RecipeStep, RetainedInput
from lowtide.timeline.hardware import Hardware
from lowtide.timeline.step import Link

MIB = 1 << 20
SECONDS = 1e-3
OPS = ("norm.mul", "attn.sdpa", "mlp.gate.mm", "mlp.up.mm", "mlp.silu", "mlp.mul")
MIBS = (32, 16, 56, 56, 56, 56)
MAKES = {"norm.mul": ("input",), "mlp.silu": ("mlp.gate.mm",), "mlp.mul": ("mlp.silu", "mlp.up.mm")}

ROUND_HARDWARE = Hardware(
    name="cpu-like",
    memory_bytes=2**30,
    flops_per_second={"float32": 1e9, "bfloat16": 2e9},
    attention={"flash": (1e9, 5e8), "efficient": (4e8, 2e8)},
    ramp_tokens=0.0,
    memory_bytes_per_second=1e9,
    eager_bytes_per_second=1e9,
    launch_seconds=1e-6,
    link=Link(out_bytes_per_second=1e8, in_bytes_per_second=1e8),
)


def decoder_profile(num_layers: int = 4, *, hidden: bool = False, is_fake: bool = True) -> Profile:
    """Forward: per layer one operator for each of `OPS`, then the head. Backward: the same the other way round."""
    layers = tuple(f"model.layers.{index}" for index in range(num_layers))
    num_forward = num_layers * len(OPS) + 1
    num_ops = 2 * num_forward
    nodes = []
    for layer_index, layer in enumerate(layers):
        start = layer_index * len(OPS)
        nodes.append(
            _node(
                f"{layer}.input",
                layer,
                16,
                born=max(start - 1, 0),
                num_ops=num_ops,
                retained_input=True,
                last=start + 1,
            )
        )
        for op_index, (op, mib) in enumerate(zip(OPS, MIBS, strict=True)):
            inputs = tuple(f"{layer}.{name}" for name in MAKES.get(op, ()))
            nodes.append(_node(f"{layer}.{op}", layer, mib, born=start + op_index, num_ops=num_ops, inputs=inputs))
    nodes.append(_node("lm_head.mm", None, 64, born=num_forward - 1, num_ops=num_ops))
    names = [f"{layer}.{op}" for layer in layers for op in OPS] + ["lm_head.mm"]
    weight_bytes = 128 * MIB
    made = [0] * num_forward + [(index + 1) * weight_bytes // num_forward for index in range(num_forward)]
    return Profile(
        model="Decoder",
        device="h200" if is_fake else "cpu",
        is_fake=is_fake,
        batch="input_ids int64[1, 4096]",
        layers=layers,
        signatures=("a",) * num_layers,
        state=StateBytes(parameters=weight_bytes, gradients=weight_bytes, optimizer=2 * weight_bytes, inputs=32768),
        num_forward_ops=num_forward,
        op_names=tuple(names) + tuple(f"{name}:backward" for name in reversed(names)),
        op_seconds=(SECONDS,) * num_forward + (2 * SECONDS,) * num_forward,
        op_bytes=tuple(8 * MIB + count for count in made),
        op_gradient_bytes=tuple(made),
        nodes=tuple(nodes),
        hidden=(HiddenBytes(name="model.layers.0.attn.Rotary", nbytes=24 * MIB),) if hidden else (),
    )


def _node(
    name: str,
    layer: str | None,
    mib: int,
    *,
    born: int,
    num_ops: int,
    retained_input: bool = False,
    last: int | None = None,
    inputs: tuple[str, ...] = (),
) -> Site:
    read = num_ops - 1 - born
    recipe = Recipe(
        inputs=tuple(RecipeInput(kind="node", name=source, geometry=_geometry(mib)) for source in inputs),
        steps=(RecipeStep(op="aten.mul.Tensor", args=({"input": 0}, 2.0)),),
        seconds=SECONDS / 20,
        transient_bytes=mib * MIB,
    )
    return Site(
        name=name,
        layer=layer,
        nbytes=mib * MIB,
        dtype="bfloat16",
        op=name.rpartition(".")[2],
        retained_input=RetainedInput(module=layer or "", side="input", leaf=0) if retained_input else None,
        born=born,
        saved=born,
        dies=last if last is not None else min(born + 2, num_ops // 2),
        reads=() if retained_input else (read,),
        release=0 if retained_input else read + 1,
        first_sequence=born,
        last_sequence=born,
        recipe=recipe if inputs else None,
        why_no_recipe="" if inputs else "unknown producer",
    )


def _geometry(mib: int) -> Geometry:
    return Geometry(size=(mib * MIB // 2,), stride=(1,), offset=0, dtype="bfloat16")
