"""One rank's share of a run: its model, its optimizer, its part of the data, and how it takes one step.

What: a step is `grad_accumulation` micro-batches; every micro-batch has the same number of tokens, so the mean of
their means is the mean over the tokens, and nothing is weighed wrongly. Its text and its random numbers follow from its
number, so that a run that is resumed has those that it would have had. Under `torchrun` gradients are exchanged (DDP)
in the last micro-batch of a step only. With `train.expert_parallel` the experts are split over ranks and gradients are
exchanged after the last micro-batch (experts.py). With a section `pipeline` each rank has some layers (stages.py), with
`parallel.shard` a part of each (shards.py).
Cost beyond the model: one wait for the device per step, because every loss is looked at before it can reach the
weights; AdamW is the fused one where the device has it, which needs no temporaries.
Not covered: other optimizers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

import lowtide
from examples.train import checkpoint
from examples.train.data import Sampler, open_text
from examples.train.experts import check_ranks, split_for
from examples.train.progress import PlanRecord, StepRecord, resident_bytes
from examples.train.ranks import Ranks, StopRequest, TrainingError
from examples.train.shards import check_shards, own_gradients, shard_for, whole_of
from examples.train.stages import RankStages, check_stages
from examples.train.tensor import ranks_of_a_stage
from lowtide.cli.run_model import build_model
from lowtide.cli.run_step import make_optimizer
from lowtide.config.run import RunConfig, TrainConfig
from lowtide.core.log import Listener
from lowtide.mindformers.follow import follow
from lowtide.pipeline.agree import facts_of_model, same_on_all

if TYPE_CHECKING:
    from lowtide.runtime.session.tide import Tide
    from lowtide.runtime.session.tides import Tides


_RUN = "lowtide train"
_FREE = {
    *("model.fields", "model.locations", "data.files", "pipeline.layers", "pipeline.overlap"),
    *(
        "train.allow_non_finite",
        "train.log_every",
        "train.checkpoint_every",
        "train.output_dir",
        "train.checkpoint_dir",
    ),
    *("train.resume", "train.device", "train.engine", "train.threads"),
}
"""What a run that is resumed may have otherwise."""


class Trainer:
    """One rank's model, optimizer and part of the data, ready for the next step."""

    def __init__(self, run: RunConfig, *, ranks: Ranks, device: torch.device) -> None:
        self.run = run
        self.ranks = ranks
        self.device = device
        check = check_stages if run.pipeline is not None else check_shards if run.is_sharded else check_ranks
        memory = "written" if run.memory is not None else "absent"
        facts = {f"train.{name}": getattr(run.train, name) for name in ("steps", "checkpoint_every", "resume")}
        facts |= {"output_dir": run.output_dir, "section memory": memory, "section parallel": run.parallel}
        same_on_all({**settings_of(run), **facts}, what=_RUN)
        check(run, ranks)
        self.reader, self.num_readers = _reader(run, ranks)
        self.corpus = open_text(run)
        self.sampler = Sampler(
            corpus=self.corpus,
            sequence_length=run.data.sequence_length,
            batch_size=run.train.batch_size,
            seed=run.train.seed,
            rank=self.reader,
            num_ranks=self.num_readers,
        )
        self.model = build_model(run)
        same_on_all({"data.files (sha256)": self.corpus.sha256, **facts_of_model(self.model)}, what=_RUN)
        self.stages = RankStages(run, self.model, ranks, device) if run.pipeline is not None else None
        self.experts = split_for(run, self.model, ranks) if self.stages is None else self.stages.experts
        self.shards = shard_for(run, self.model, ranks, device)
        self.model.to(device)
        self.optimizer = make_optimizer(self.model, run.train)
        self.resumed_from = checkpoint.to_resume(run)
        self.step = self._load(self.resumed_from) if self.resumed_from else 0
        """Optimizer steps done."""
        same_on_all({"steps done": self.step}, what=_RUN)
        self._has_compared = False
        """Whether ranks that share products have compared the gradients that they must have in common."""
        self.say: Callable[[str], None] = lambda line: None
        """Hears the lines of the logger `lowtide`."""
        self._listener = Listener(self._tell)
        self.tide: Tide | Tides | None = None
        self._forward: torch.nn.Module = self.model
        if self.stages is not None:
            self.stages.begin(self.optimizer)
        else:
            self.tide = self._take_up_memory()
            if not ranks.is_alone and self.experts is None and self.shards is None:
                self._forward = DistributedDataParallel(self.model)

    def _take_up_memory(self) -> Tide | Tides | None:
        """Rules are followed as written; a budget is planned for in the first step."""
        memory, sections = self.run.memory, self.run.sections
        how: Any = {"optimizer": self.optimizer, "engine": self.run.train.engine}
        if sections is not None:
            return follow(self.model, sections, memory=memory, **how)
        if memory is None:
            return None
        if not memory.has_budget:
            return lowtide.apply(self.model, memory, **how)
        return lowtide.optimize(self.model, memory=memory, **how)

    def _tell(self, line: str) -> None:
        self.say(line)  # looked up at each call: `self.say` is set after the plan was put on

    @property
    def description(self) -> str:
        """What is trained, on what, by whom."""
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        ranks = "" if self.ranks.is_alone else f" on {self.ranks.num_ranks} ranks"
        if self.shards is not None:
            ranks += f", {self.shards.layout}"
        if self.stages is not None:
            num_parameters = self.stages.num_parameters
            ranks += f", stages of {', '.join(map(str, self.stages.layer_counts))} layers"
        if self.experts is not None:
            num_ranks = self.experts.split.num_ranks
            if self.stages is None:
                num_parameters += (num_ranks - 1) * sum(p.numel() for p in self.experts.split.own_parameters())
            ranks += f", experts split over {num_ranks}"
        if self.run.train.tensor_parallel > 1:
            ranks += f", products over {self.run.train.tensor_parallel}"
        return (
            f"{num_parameters:,} parameters, {len(self.corpus.text):,} bytes of text "
            f"(sha256 {self.corpus.sha256[:12]}), {self.tokens_per_step:,} tokens per step, {self.device}{ranks}"
        )

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        num_sequences = self.run.train.batch_size * self._num_micro_batches * self.num_readers
        return num_sequences * self.run.data.sequence_length

    @property
    def _num_micro_batches(self) -> int:
        pipeline = self.run.pipeline
        return self.run.train.grad_accumulation if pipeline is None else pipeline.micro_batches

    def take_step(self, stop: StopRequest) -> tuple[StepRecord, signal.Signals | None]:
        """One optimizer step, and the signal on which all ranks agree to stop after it."""
        self._start_count()
        self._seed_step()
        start = time.perf_counter()
        learning_rate = learning_rate_at(self.step, self.run.train)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        own_loss = self._accumulate_gradients()
        if self.shards is not None and not self._has_compared:
            self.shards.compare_gradients(self.model)
            self._has_compared = True
        pass_seconds = (time.perf_counter() - start) / self.run.train.grad_accumulation
        loss, asked = self._agree(own_loss, stop)
        grad_norm = self._clip()
        self._check_finite(loss, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - start
        resident, peak_resident = resident_bytes()
        counted = self.tide or self.stages
        stats = counted.stats if counted is not None else None
        record = StepRecord(
            step=self.step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            step_seconds=seconds,
            tokens_per_second=self.tokens_per_step / seconds,
            peak_bytes=stats.peak_device_bytes if stats else self._peak_bytes(),
            resident_bytes=resident,
            peak_resident_bytes=peak_resident,
            tide=dataclasses.asdict(stats) if stats else None,
            plan=self._plan_record(pass_seconds),
            device=self.device.type,
        )
        return record, asked

    def _seed_step(self) -> None:
        # Ranks that share products must draw alike.
        place = self.ranks.rank if self.shards is None else self.reader
        _seed(random.Random(f"{self.run.train.seed} {place} {self.step}").getrandbits(62))

    def _plan_record(self, pass_seconds: float) -> PlanRecord | None:
        if self.stages is not None:
            return self.stages.plan_record(pass_seconds)
        plan = self.tide.plan if self.tide is not None else None
        if plan is None or plan.predicted is None:
            return None
        return PlanRecord(
            digest=plan.digest(),
            predicted_peak_bytes=plan.predicted.peak_bytes,
            predicted_seconds=plan.predicted.pass_seconds,
            measured_seconds=pass_seconds,
            predicted_stall_seconds=plan.predicted.stall_seconds,
            num_corrections=getattr(self.tide, "num_corrections", 0),
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's weights, of a pipeline those of this rank; with shards or split experts, those of all ranks; then
        collective."""
        if self.shards is not None:
            return {name: whole_of(tensor) for name, tensor in self.model.state_dict().items()}
        if self.experts is None or self.stages is not None:
            return self.model.state_dict()
        return self.experts.split.full_state_dict()

    def save(self) -> Path:
        how: Any = {"step": self.step, "settings": self._settings(), "ranks": self.ranks}
        return checkpoint.save(self.run.checkpoint_dir, self._state(), **how)

    def _load(self, path: Path) -> int:
        return checkpoint.load(path, self._state(), settings=self._settings(), ranks=self.ranks)

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint is compared with: what shapes the loss curve, and who has what of the model."""
        settings = settings_of(self.run) | {"data.files (sha256)": self.corpus.sha256}
        if self.shards is None:
            own = {} if self.stages is None else self.stages.settings
            return settings | own | {"number of ranks": self.ranks.num_ranks}
        # Another number of ranks may take the run up, if a step has the same sequences.
        num_sequences = settings.pop("train.batch_size") * settings.pop("train.grad_accumulation") * self.num_readers
        return settings | {"parallel.shard": True, "sequences of a step": num_sequences}

    def _state(self) -> checkpoint.State:
        rename: Callable[[str], str] | None = None
        if self.stages is not None:  # ranks of pipelines that share experts have parts of the same name
            rename = f"{{}}[rank {self.ranks.rank}]".format
        elif self.experts is not None:
            rename = self.experts.name_of
        return checkpoint.State(self.model, self.optimizer, rename)

    def close(self) -> None:
        """Leaves the model as it was built, and lets go of the process group."""
        self._listener.close()
        self._forward = self.model
        if self.stages is not None:
            self.stages.close()
        if self.tide is not None:
            self.tide.remove()

    def _accumulate_gradients(self) -> float:
        """Forward and backward of all micro-batches; the mean loss of this rank."""
        count = self._num_micro_batches
        batches = map(self.sampler.batch, range(self.step * count, (self.step + 1) * count))  # (B, T) each
        if self.stages is not None:
            return self.stages.take_passes(batches, self._tell)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, tokens in enumerate(batches, start=1):
            run = functools.partial(self._run_micro_batch, tokens.to(self.device), is_last=number == count)
            total += self.tide.step(run) if self.tide is not None else run()
        if self.experts is not None:
            self.experts.average_gradients()
        return float(total) / count

    def _run_micro_batch(self, tokens: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        """Forward and backward; the loss. It may run again if memory runs out."""
        with self._exchange(is_on=is_last), self._autocast():
            loss = self._forward(input_ids=tokens, labels=tokens).loss
        with self._exchange(is_on=is_last):
            (loss / self.run.train.grad_accumulation).backward()
        return loss.detach()

    def _exchange(self, *, is_on: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are exchanged between ranks once per step, in its last micro-batch."""
        if is_on or not isinstance(self._forward, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._forward.no_sync()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.run.train.precision != "bf16_autocast":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _agree(self, loss: float, stop: StopRequest) -> tuple[float, signal.Signals | None]:
        """The mean loss of all ranks that have one, and whether any of them was asked to stop."""
        flags = [float(stop.asked is number) for number in (signal.SIGTERM, signal.SIGINT)]
        total, num_terminated, num_interrupted = self.ranks.sum([loss, *flags])
        asked = signal.SIGTERM if num_terminated else signal.SIGINT if num_interrupted else None
        return total / (self.ranks.num_ranks if self.stages is None else self.num_readers), asked

    def _clip(self) -> float:
        """Scales the gradients down to `clip_grad_norm`; their norm before that."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.stages is not None:
            norm = self.stages.gradient_norm()
        elif self.experts is not None:
            norm = self.experts.split.gradient_norm()
        elif self.shards is not None:
            norm = self.ranks.norm(own_gradients(parameters, self.ranks))
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.run.train.clip_grad_norm is not None:
            # Shards over different ranks cannot be in one call.
            how: Any = {} if self.shards is None else {"foreach": False}
            torch.nn.utils.clip_grads_with_norm_(parameters, self.run.train.clip_grad_norm, norm, **how)
        return float(norm)

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        if self.run.train.allow_non_finite or (math.isfinite(loss) and math.isfinite(grad_norm)):
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {grad_norm}"
        raise TrainingError(
            f"step {self.step + 1}: {what}; stopped before it reached the weights. Lower train.learning_rate, "
            "raise train.warmup_steps, or write train.allow_non_finite: true to go on all the same"
        )

    def _start_count(self) -> None:
        """Peak and lowtide's totals are those of one step."""
        if self.stages is not None:
            self.stages.reset_stats()
        if self.tide is not None:
            self.tide.reset_stats()
        elif self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)

    def _peak_bytes(self) -> int | None:
        """Without a tide: what the allocator knows; the CPU's knows nothing."""
        return None if self.device.type == "cpu" else torch.accelerator.max_memory_allocated(self.device)


def settings_of(run: RunConfig) -> dict[str, Any]:
    """What shapes the loss curve, flat: a checkpoint is only resumed by a run with the same ones.

    `memory` is not among them: lowtide does not change a bit.
    """
    sections = {"model": run.model, "data": run.data, "train": run.train, "pipeline": run.pipeline}
    found = {
        f"{name}.{entry.name}": getattr(section, entry.name)
        for name, section in sections.items()
        if section is not None
        for entry in dataclasses.fields(section)
        if f"{name}.{entry.name}" not in _FREE
    }
    if run.train.schedule == "constant":
        del found["train.steps"]  # the length of a constant run may be changed, that of a cosine run bends the curve
    found["model.path"] = str(run.model.path) if run.model.path else None
    return found | {f"model.{key}": value for key, value in run.model.fields.items()}


def learning_rate_at(step: int, settings: TrainConfig) -> float:
    """The rate of the step that follows `step` done ones: linear warm-up, then constant or a cosine down to zero."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _reader(run: RunConfig, ranks: Ranks) -> tuple[int, int]:
    """Which of how many readers of the text this rank is: ranks of one pipeline, and ranks that share products, are
    one."""
    if run.pipeline is not None:
        beside, size = ranks_of_a_stage(run), run.train.tensor_parallel
        return ranks.rank % beside // size, beside // size
    size = run.parallel.tensor or 1 if run.parallel is not None and run.is_sharded else 1
    return ranks.rank // size, ranks.num_ranks // size


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
