"""One step of a run file, looked at instead of trained: with fake tensors, or for real on the run's own device.

What: `trace_run` needs no weights and no device; `observe_run` builds the model, takes one micro-batch of random bytes
through it, and changes nothing. Both see the step as the trainer takes it: its precision, its optimizer's state.
`changes_of` lists changes of a run file that `lowtide plan` tries where no plan fits, each traced as it would run: half
the micro-batch, weights in bf16, the loss in slices or with its head in blocks, parameters in shards. Only those that
make the largest part of the memory smaller are tried (planner/advice.py).
Cost: `trace_run` a second or two; `observe_run` a few plain steps, and the weights.
Not covered: several ranks; every rank's step is the same but for what gradients' exchange takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lowtide.cli.run_model import build_model, fresh_model, model_config
from lowtide.cluster.sharded import Sharding, sharded_profile
from lowtide.config.memory import BlocksOfRows, MemoryConfig, plan_from_rules
from lowtide.config.run import NUM_BYTE_TOKENS, RunConfig, TrainConfig
from lowtide.core.profile import Profile
from lowtide.engines.bandwidth import cache_path, measure_link
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import attach_where
from lowtide.planner.advice import ACTIVATIONS, GRADIENTS, HALF_A_BATCH, LOSS, OPTIMIZER, STEP, WEIGHTS, Change
from lowtide.profiling.fake.trace import trace
from lowtide.profiling.observe_step import observe
from lowtide.runtime.autopilot.plan_model import hardware_of_device
from lowtide.timeline.hardware import Hardware, load_hardware
from lowtide.timeline.step import Link

Say = Callable[[str], None]


def choose_device(name: str, *, local_rank: int = 0) -> torch.device:
    """`auto` is the accelerator if there is one, else the CPU; an accelerator without index is this rank's own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        name = accelerator.type if accelerator else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"'{name}' is not a device; write auto, cpu or the accelerator's name, such as cuda"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        found = f"cpu and {accelerator.type}" if accelerator else "only cpu"
        raise ConfigError(f"device '{name}' is not available; this machine has {found}. Write auto or cpu")
    num_devices = torch.accelerator.device_count()
    index = local_rank if device.index is None else device.index
    if index >= num_devices:
        raise ConfigError(f"device '{name}': index {index} does not exist; there are {num_devices}")
    return torch.device(device.type, index)


def device_of_run(run: RunConfig) -> torch.device:
    """Where the run would train. Raises ConfigError for a device that is not there."""
    try:
        return choose_device(run.train.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    except ConfigError as error:
        run.fail("train.device", f"'train.device': {error}")


def make_optimizer(model: torch.nn.Module, settings: TrainConfig) -> torch.optim.Optimizer:
    """It decays matrices, not norms and biases. A group has shards over the same ranks: one call steps all."""
    groups: dict[Any, dict[str, Any]] = {}
    for parameter in sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.ndim < 2):
        weight_decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
        key = (parameter.ndim >= 2, getattr(parameter, "device_mesh", None))
        groups.setdefault(key, {"params": [], "weight_decay": weight_decay})["params"].append(parameter)
    parameters: list[dict[str, Any]] = [*groups.values()]
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor(parameters, lr=settings.learning_rate)
    make: Any = torch.optim.AdamW
    if settings.optimizer == "sgd":
        make = functools.partial(torch.optim.SGD, momentum=0.9)
    try:
        return make(parameters, lr=settings.learning_rate, fused=True)
    except RuntimeError:  # this device has no fused kernel
        return make(parameters, lr=settings.learning_rate)


def hardware_of_run(run: RunConfig) -> Hardware:
    """What is known about that device."""
    return load_hardware(hardware_of_device(device_of_run(run)))


def observe_run(run: RunConfig, *, say: Say) -> Profile:
    """A real step on the device of the run. Raises ConfigError for mistakes that show only there."""
    _refuse_parts(run)
    device = device_of_run(run)
    if run.train.threads is not None:
        torch.set_num_threads(run.train.threads)
    say("building the model")
    model = build_model(run).to(device)
    optimizer = make_optimizer(model, run.train)
    shape = (run.train.batch_size, run.data.sequence_length)
    generator = torch.Generator().manual_seed(run.train.seed)
    tokens = torch.randint(NUM_BYTE_TOKENS, shape, generator=generator).to(device)
    say("observing one step")
    with _as_trained(run, model, device.type):
        return observe(model, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer)


def trace_run(run: RunConfig, hardware: Hardware, *, say: Say, like: Profile | None = None) -> Profile:
    """A step that nothing runs: bytes are exact, times are the roofline of `hardware`. `like`: of the same run with
    another batch, whose optimizer need not be looked at again."""
    _refuse_parts(run)
    say("building the model without weights")
    config = model_config(run)
    with torch.device("meta"):
        model = fresh_model(run, config, getattr(torch, run.model.dtype)).train()
    optimizer = make_optimizer(model, run.train)
    for group in optimizer.param_groups if "fused" in optimizer.defaults else ():
        group["fused"] = True  # as on a device that has it; the meta device does not, and would count temporaries
    tokens = torch.empty(run.train.batch_size, run.data.sequence_length, dtype=torch.int64, device="meta")
    say("tracing one step")
    with _as_trained(run, model, "cpu"):
        batch = {"input_ids": tokens, "labels": tokens}
        return trace(model, batch, hardware=hardware, optimizer=optimizer, state=None if like is None else like.state)


def weights_of_run(run: RunConfig) -> dict[str, torch.nn.Parameter]:
    """The parameters of the run's model by name. They are built without memory."""
    with torch.device("meta"):
        return dict(fresh_model(run, model_config(run), getattr(torch, run.model.dtype)).named_parameters())


def layer_bytes(run: RunConfig, layers: Sequence[str]) -> dict[str, int]:
    """Bytes of the parameters of each of these layers, as the run has them."""
    weights = weights_of_run(run)
    return {layer: sum(p.nbytes for name, p in weights.items() if name.startswith(f"{layer}.")) for layer in layers}


def _refuse_parts(run: RunConfig) -> None:
    """Raises `ConfigError` where a rank has a part of the model."""
    if run.train.expert_parallel > 1:
        run.fail(
            "train.expert_parallel",
            f"'train.expert_parallel' is {run.train.expert_parallel}, but a step of one rank alone is looked at here; "
            "take it out to see the step of a rank that has all experts",
        )
    if run.pipeline is not None:
        run.fail("pipeline", "'pipeline': a step of the whole model is looked at here; take the section out to see it")


@contextlib.contextmanager
def _as_trained(run: RunConfig, model: torch.nn.Module, device_type: str) -> Iterator[None]:
    """Inside, the model's forward runs under autocast if the trainer's does (the backward never does), and its loss is
    taken as the run says."""
    with contextlib.ExitStack() as undo:
        if run.train.precision == "bf16_autocast":
            model.forward = torch.autocast(device_type, dtype=torch.bfloat16)(model.forward)
            undo.callback(delattr, model, "forward")
        undo.enter_context(attach_where(model, **(run.memory or MemoryConfig()).slices_loss))
        yield


def link_of_device(run: RunConfig, device_type: str) -> Link:
    """The link of a device of this machine, measured or as it was measured before."""
    device = device_of_run(run)
    if device.type != device_type:
        raise ConfigError(
            f"--profile: it was observed on {device_type}, and this run trains on {device.type}; say which device to "
            "plan for with --hardware"
        )
    memory = run.memory or MemoryConfig()
    place = torch.nn.Linear(1, 1, device=device)
    engine = choose_engine(run.train.engine, place, plan_from_rules(memory, ()))
    with contextlib.closing(engine):
        return measure_link(engine, device, place=str(memory.disk_path or ""), cache=cache_path())


_RANKS = (2, 8)
_ROWS = 16384


def changes_of(run: RunConfig, hardware: Hardware, traced: Profile) -> Iterator[Change]:
    """Of a run whose step was `traced` for this device."""

    def change(text: str, helps: tuple[str, ...], other: RunConfig) -> Change:
        return Change(
            text=text, helps=frozenset(helps), profile=lambda: trace_run(other, hardware, say=lambda text: None)
        )

    state = (WEIGHTS, GRADIENTS, OPTIMIZER, STEP)
    train, memory = run.train, run.memory or MemoryConfig()
    if traced.loss == "plain" and memory.loss != "auto":
        sliced = dataclasses.replace(memory, loss="auto")
        yield change("memory.loss: auto", (LOSS,), dataclasses.replace(run, memory=sliced))
    if memory.slices_loss["rows"] is None and train.batch_size * run.data.sequence_length > 2 * _ROWS:
        blocks = dataclasses.replace(memory, loss=BlocksOfRows(rows=_ROWS))
        text = f"memory.loss: {{rows: {_ROWS}}}, which has bits of its own"
        yield change(text, (LOSS,), dataclasses.replace(run, memory=blocks))
    if train.batch_size >= 2:
        half = dataclasses.replace(run, train=dataclasses.replace(train, batch_size=train.batch_size // 2))
        text = f"{HALF_A_BATCH}, train.batch_size: {train.batch_size // 2}"
        yield change(text, (ACTIVATIONS, LOSS), half)
    if train.precision != "bf16":
        narrow = dataclasses.replace(
            run,
            train=dataclasses.replace(train, precision="bf16"),
            model=dataclasses.replace(run.model, dtype="bfloat16"),
        )
        yield change("train.precision: bf16", state, narrow)
    for ranks in _RANKS:
        yield Change(
            text=f"parallel: {{shard: fsdp2, data: {ranks}}}, without its network",
            helps=frozenset(state),
            profile=lambda ranks=ranks: sharded_profile(  # type: ignore[misc]
                traced, layer_bytes(run, traced.layers), sharding_of(run, ranks)
            ),
        )


def sharding_of(run: RunConfig, ranks: int, replicas: int = 1) -> Sharding:
    """The run's parameters over so many ranks, of which each replica has as many."""
    width = 2 if run.model.dtype == "bfloat16" else 4
    each: Any = {"stored_width": width, "gathered_width": width, "reduced_width": width}
    return Sharding(ranks=ranks // replicas, replicas=replicas, **each)
