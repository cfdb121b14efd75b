"""A small reference trainer: byte sequences, exact to the bit across interruptions.

What: `train(run)` builds the model and the data of a run file, resumes if it can, and takes optimizer steps until
`train.steps` or a signal. A step is `grad_accumulation` micro-batches with equally many tokens. Its text and its random
numbers follow from its number, so that a run that is resumed has those that it would have had.
Of several ranks each has the model, and DDP exchanges gradients once per step; or a share of the experts (ranks.py), a
part of each layer (products.py), or some layers (stages.py).
Cost: a wait for the device per step, because every loss is looked at before it can reach the weights.
Not covered: evaluation. Equality to the bit holds where the device itself repeats its sums to the bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import lowtide
from examples.train import checkpoint
from examples.train.data import Sampler, text_of
from examples.train.products import compare_gradients, shard
from examples.train.progress import RunFiles, line_of, resident_bytes
from examples.train.ranks import Layout, Ranks, StopRequest, TrainingError
from examples.train.stages import RankStages
from lowtide.cli.run_model import build_model
from lowtide.cli.run_step import device_of_run, make_optimizer
from lowtide.config.run import RunConfig, TrainConfig
from lowtide.core.log import Listener
from lowtide.mindformers.follow import follow
from lowtide.pipeline.agree import facts_of_model, same_on_all
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.ranks import gather

_RUN = "lowtide train"
_FREE = {
    *("model.fields", "model.locations", "data.files", "pipeline.layers", "pipeline.overlap"),
    *("train.allow_non_finite", "train.log_every", "train.checkpoint_every", "train.output_dir"),
    *("train.checkpoint_dir", "train.resume", "train.device", "train.engine", "train.threads"),
}
"""What a run that is resumed may have otherwise."""
OnStep = Callable[[Mapping[str, Any]], None]


def train(run: RunConfig, *, on_step: OnStep | None = None) -> signal.Signals | None:
    """Trains; gives the signal that stopped it, if one did. `on_step` is called on every rank after every step, with
    its line of metrics.jsonl. Raises `ConfigError` (settings, checkpoint, text) and `TrainingError` (loss not finite,
    disk full); in a group of ranks a failure ends the processes of all of them here, with one message.
    """
    device = device_of_run(run)
    if run.train.threads is not None:
        torch.set_num_threads(run.train.threads)
    ranks = Ranks(device)
    with StopRequest() as stop, Listener(ranks.say):
        try:
            with contextlib.ExitStack() as undo:
                asked = Trainer(run, ranks=ranks, device=device, undo=undo).take_steps(stop, on_step)
            ranks.leave()
        except Exception as error:
            ranks.fail(_told(error, ranks, run))
    return asked


def _told(error: Exception, ranks: Ranks, run: RunConfig) -> Exception:
    """Alone, a run that is out of memory ends with one line; in a group, `Ranks.fail` says which rank it was."""
    if not ranks.is_alone or not is_out_of_memory(error):
        return error
    where = f"step {ranks.step}" if ranks.step else "while the run started"
    first, *_ = str(error).splitlines() or [type(error).__name__]
    has_budget = run.memory is not None and run.memory.has_budget
    way_out = " or memory.budget" if has_budget else ", or write a budget into the section 'memory'"
    return TrainingError(f"{where}: out of memory: {first}; lower train.batch_size{way_out}")


class Trainer:
    """One rank's model, optimizer and part of the data, ready for the next step."""

    def __init__(self, run: RunConfig, *, ranks: Ranks, device: torch.device, undo: contextlib.ExitStack) -> None:
        """`undo` leaves the model as it was built."""
        self.run, self.ranks, self.device = run, ranks, device
        text = text_of(run)
        self._text_sha256 = hashlib.sha256(text).hexdigest()
        facts = {f"train.{name}": getattr(run.train, name) for name in ("steps", "checkpoint_every", "resume")}
        facts |= {"output_dir": run.output_dir, "section parallel": run.parallel}
        facts["section memory"] = "absent" if run.memory is None else "written"
        same_on_all({**settings_of(run), **facts, "data.files (sha256)": self._text_sha256}, what=_RUN)
        self.layout = Layout(run, ranks)
        self._num_micro_batches = run.pipeline.micro_batches if run.pipeline else run.train.grad_accumulation
        self._num_sequences = run.train.batch_size * self._num_micro_batches * self.layout.num_texts
        """Of a step, of all ranks."""
        self.sampler = Sampler(
            text=text,
            sequence_length=run.data.sequence_length,
            batch_size=run.train.batch_size,
            seed=run.train.seed,
            rank=self.layout.text,
            num_ranks=self.layout.num_texts,
        )
        self.model: Any = build_model(run)
        same_on_all(facts_of_model(self.model), what=_RUN)
        self._num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.stages: RankStages | None = None
        if run.pipeline is not None:
            self.stages = RankStages(run, self.model, self.layout, device)
            self.model = self.stages.model
        elif run.is_sharded:
            shard(run, self.model, self.layout, device)
        elif run.train.expert_parallel > 1:
            self.layout.split_experts(run, self.model, self.model)
        self._dealt = {} if self.stages is None else {"layers of stages": self.stages.layer_counts}
        self.model.to(device)
        assert self.layout.parts.keys() <= set(self.model.parameters()), "a parameter was exchanged after it was split"
        self.optimizer = make_optimizer(self.model, run.train)
        self.resumed_from = checkpoint.to_resume(run)
        self.step = 0
        """Optimizer steps done."""
        if self.resumed_from is not None:
            self.step = checkpoint.load(self.resumed_from, self._tensors(), settings=self._settings(), ranks=ranks)
        self.first_step = self.step
        same_on_all({"steps done": self.step, **self._dealt}, what=_RUN)
        self.tide: Any = None
        self._forward: Any = self.model
        if self.stages is not None:
            self.stages.begin(self.optimizer, undo)
            return
        how: Any = {"memory": run.memory, "optimizer": self.optimizer, "engine": run.train.engine}
        if run.sections is not None:
            self.tide = undo.enter_context(follow(self.model, run.sections, **how))
        elif run.memory is not None:
            # Rules are followed as written; a budget is planned for in the first step.
            attach: Any = lowtide.optimize if run.memory.has_budget else lowtide.apply
            self.tide = undo.enter_context(attach(self.model, **how))
        if not (ranks.is_alone or run.is_sharded or self.layout.parts):
            self._forward = DistributedDataParallel(self.model)

    @property
    def description(self) -> str:
        """What is trained, on what, by whom."""
        text = f"{len(self.sampler.text):,} bytes of text (sha256 {self._text_sha256[:12]})"
        tokens = f"{self._num_sequences * self.run.data.sequence_length:,} tokens per step"
        parts = [f"{self._num_parameters:,} parameters", text, tokens, f"{self.device}{self.layout}"]
        if self.stages is not None:
            parts.append(f"stages of {', '.join(map(str, self.stages.layer_counts))} layers")
        return ", ".join(parts)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def take_steps(self, stop: StopRequest, on_step: OnStep | None) -> signal.Signals | None:
        """Steps until the last one or a signal, which it gives; a checkpoint at the end in either case."""
        run, settings, newest, say = self.run, self.run.train, self.resumed_from, self.ranks.say
        asked: signal.Signals | None = None
        files = RunFiles(run.output_dir, first_step=self.step, warn=say) if self.ranks.is_first else None
        say(self.description)
        if newest:
            say(f"resumed from {newest}")
        while self.step < settings.steps and asked is None:
            self.ranks.step = self.step + 1
            record, asked = self._take_step(stop)
            if files is not None:
                files.append(record)
                files.follow(self.tide)
            is_last = self.step == settings.steps
            is_due = is_last or self.step == self.first_step + 1 or self.step % settings.log_every == 0
            if is_due or (record["tide"] and record["tide"]["num_retries"]):
                say(line_of(record, settings.steps))
            if on_step is not None:
                on_step(record)
            if is_last or asked or (settings.checkpoint_every and self.step % settings.checkpoint_every == 0):
                how: Any = {"step": self.step, "settings": self._settings(), "ranks": self.ranks}
                newest = checkpoint.save(run.checkpoint_dir, self._tensors(), **how)
        if self.step >= settings.steps:
            asked = None  # a signal in the last step came too late to stop anything
        if asked:
            done = f"after step {self.step} of {settings.steps}"
            say(f"stopped by {asked.name} {done}; saved {newest}; run again to go on")
        elif self.step == self.first_step:
            say(f"nothing left to do: {newest} has all {settings.steps} steps; raise train.steps to train on")
        else:
            say(f"done: {settings.steps} steps; saved {newest}")
        return asked

    def _take_step(self, stop: StopRequest) -> tuple[dict[str, Any], signal.Signals | None]:
        """One optimizer step: its line of metrics.jsonl, and the signal on which all ranks agree to stop after it."""
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)
        for tide in self._tides:
            tide.reset_stats()  # peak and totals are those of one step
        # Ranks that share products of shards must draw alike.
        place = self.layout.text if self.run.is_sharded else self.ranks.rank
        _seed(random.Random(f"{self.run.train.seed} {place} {self.step}").getrandbits(62))
        start = time.perf_counter()
        learning_rate = learning_rate_at(self.step, self.run.train)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        own_loss = self._accumulate_gradients()
        self.layout.average_gradients(self.model.parameters())
        if self.run.is_sharded and self.step == self.first_step:
            compare_gradients(self.model)
        pass_seconds = (time.perf_counter() - start) / self._num_micro_batches
        loss, grad_norm, asked = self._agree(own_loss, stop)
        self._check_finite(loss, grad_norm)
        most, parameters = self.run.train.clip_grad_norm, self.model.parameters()
        if most is not None:
            foreach = False if self.run.is_sharded else None  # shards over different ranks cannot be in one call
            torch.nn.utils.clip_grads_with_norm_(parameters, most, torch.tensor(grad_norm), foreach=foreach)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - start
        resident, peak_resident = resident_bytes()
        counts = [dataclasses.asdict(tide.stats) for tide in self._tides if tide.stats is not None]
        # Of several stages the sums, also of peaks, which need not come at once.
        counted = {name: sum(count[name] for count in counts) for name in counts[0]} if counts else None
        peak_bytes = counted["peak_device_bytes"] if counted else None
        if counted is None and self.device.type != "cpu":
            peak_bytes = torch.accelerator.max_memory_allocated(self.device)
        record = {
            "step": self.step,
            "loss": loss,  # the mean over all tokens of the step, on all ranks, before the optimizer moved
            "grad_norm": grad_norm,  # before clipping
            "learning_rate": learning_rate,
            "step_seconds": seconds,
            # Of all ranks; other bytes and seconds are rank 0's.
            "tokens_per_second": self._num_sequences * self.run.data.sequence_length / seconds,
            "peak_bytes": peak_bytes,
            "resident_bytes": resident,
            "peak_resident_bytes": peak_resident,
            "tide": counted,
            "plan": self._plan(pass_seconds),
            "device": self.device.type,
        }
        return record, asked

    def _plan(self, pass_seconds: float) -> dict[str, Any] | None:
        """The plan of a budget, and what it promised for one micro-batch, which took `pass_seconds`."""
        fitted = None if self.stages is None else self.stages.plans
        if fitted is not None:
            plans, peak_bytes = [*fitted.plans.values()], fitted.found.peak_bytes
        elif self.tide is not None and self.tide.plan is not None and self.tide.plan.predicted is not None:
            plans, peak_bytes = [self.tide.plan], self.tide.plan.predicted.peak_bytes
        else:
            return None
        digest = "+".join(plan.digest() for plan in plans)
        return {"digest": digest, "predicted_peak_bytes": peak_bytes, "measured_seconds": pass_seconds}

    @property
    def _tides(self) -> list[Any]:
        if self.stages is not None:
            return self.stages.tides
        return [] if self.tide is None else [self.tide]

    def _accumulate_gradients(self) -> float:
        """Forward and backward of all micro-batches; the mean loss of this rank."""
        count = self._num_micro_batches
        batches = map(self.sampler.batch, range(self.step * count, (self.step + 1) * count))  # (B, T) each
        if self.stages is not None:
            return self.stages.take_passes(batches, self.ranks.say)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, tokens in enumerate(batches, start=1):
            run = functools.partial(self._run_micro_batch, tokens.to(self.device), is_last=number == count)
            total += self.tide.step(run) if self.tide is not None else run()
        return float(total) / count

    def _run_micro_batch(self, tokens: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        """Forward and backward; the loss. It may run again if memory runs out."""
        is_narrow = self.run.train.precision == "bf16_autocast"
        waits = isinstance(self._forward, DistributedDataParallel) and not is_last
        with self._forward.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_narrow):
                loss = self._forward(input_ids=tokens, labels=tokens).loss
            (loss / self.run.train.grad_accumulation).backward()
        return loss.detach()

    def _agree(self, loss: float, stop: StopRequest) -> tuple[float, float, signal.Signals | None]:
        """Of all ranks: the mean loss of those that have one, the norm of all gradients, and the signal that one of
        them was asked to stop by."""
        elsewhere = () if self.stages is None else self.stages.pipeline.tied.counted_elsewhere()
        squares = self.layout.squares(p for p in self.model.parameters() if p not in elsewhere)
        losses, each_squares, asked = zip(*gather((loss, squares, stop.asked), None), strict=True)
        num_losses = self.ranks.num_ranks if self.stages is None else self.layout.num_texts
        # The sum is rounded once, so it is the same however the parameters are dealt to ranks.
        norm = math.sqrt(math.fsum(itertools.chain(*each_squares)))
        return sum(losses) / num_losses, norm, next(filter(None, asked), None)

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        if self.run.train.allow_non_finite or (math.isfinite(loss) and math.isfinite(grad_norm)):
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {grad_norm}"
        raise TrainingError(
            f"step {self.step + 1}: {what}; stopped before it reached the weights. Lower train.learning_rate, "
            "raise train.warmup_steps, or write train.allow_non_finite: true to go on all the same"
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint is compared with: what shapes the loss curve, and who has what of the model."""
        settings = settings_of(self.run) | {"data.files (sha256)": self._text_sha256}
        if not self.run.is_sharded:
            return settings | self._dealt | {"number of ranks": self.ranks.num_ranks}
        # Another number of ranks may take the run up, if a step has the same sequences.
        del settings["train.batch_size"], settings["train.grad_accumulation"]
        return settings | {"parallel.shard": True, "sequences of a step": self._num_sequences}

    def _tensors(self) -> checkpoint.Tensors:
        def rename(name: str) -> str:
            if self.stages is not None:  # ranks of pipelines that share experts have parts of the same name
                return f"{name}[rank {self.ranks.rank}]"
            is_part = name.endswith(self.layout.expert_names)
            return f"{name}[{self.layout.share}/{self.run.train.expert_parallel}]" if is_part else name

        return checkpoint.tensors_of(self.model, self.optimizer, rename)


def settings_of(run: RunConfig) -> dict[str, Any]:
    """What shapes the loss curve, flat: a checkpoint is only resumed by a run with the same ones. `memory` is not among
    them: lowtide does not change a bit."""
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


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
