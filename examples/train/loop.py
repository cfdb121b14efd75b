"""A small reference trainer: AdamW on byte sequences, exact to the bit across interruptions.

What: `train(run)` builds the model and the data of a run file, resumes if it can, and takes optimizer steps until
`train.steps` or a signal; trainer.py says what one step is.
Not covered: evaluation, other optimizers. Equality to the bit holds where the device itself repeats its sums to the
bit; some kernels of accelerators do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.train.progress import (
    MetricsFile,
    PlanFiles,
    PlanRecord,
    StepRecord,
    line_of,
    resident_bytes,
    say_on_stderr,
)
from examples.train.ranks import Ranks, StopRequest, TrainingError
from examples.train.trainer import Trainer
from lowtide.cli.run_step import device_of_run
from lowtide.config.run import RunConfig
from lowtide.report.run_folder import METRICS
from lowtide.tensors.out_of_memory import is_out_of_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended; what `--json` prints."""

    steps: int
    """Done in all, also before an interruption."""
    final_loss: float | None
    losses_sha256: str | None
    """Of every loss of the run; known to rank 0."""
    weights_sha256: str | None
    """Only if asked for: it reads all weights."""
    tokens_per_second: float | None
    """Of the steps of this process, without the first, which warms things up."""
    peak_bytes: int | None
    peak_resident_bytes: int | None
    stopped_by: str | None
    """`SIGTERM`, `SIGINT`, or null when all steps are done."""
    checkpoint: str | None
    """The newest one."""
    text_sha256: str
    output_dir: str
    plan: PlanRecord | None
    """Of the last step. Null without a budget."""


def train(
    run: RunConfig, *, wants_weights_hash: bool = False, on_step: Callable[[StepRecord], None] | None = None
) -> Summary:
    """Trains; `on_step` is called on every rank after every step.

    Raises `ConfigError` (settings, checkpoint, text) and `TrainingError` (loss not finite, disk full). In a group of
    ranks a failure ends the processes of all of them here, with one message.
    """
    device = device_of_run(run)
    if run.train.threads is not None:
        torch.set_num_threads(run.train.threads)
    ranks = Ranks.join(device)
    with StopRequest() as stop:
        try:
            with contextlib.closing(Trainer(run, ranks=ranks, device=device)) as trainer:
                summary = _loop(trainer, stop, on_step)
                if wants_weights_hash:
                    summary = dataclasses.replace(summary, weights_sha256=_weights_sha256(trainer.state_dict()))
            ranks.leave()
        except Exception as error:
            ranks.fail(_told(error, ranks, run))
    return summary


def _told(error: Exception, ranks: Ranks, run: RunConfig) -> Exception:
    """Alone, a run that is out of memory ends with one line; in a group, `Ranks.fail` says which rank it was."""
    if not ranks.is_alone or not is_out_of_memory(error):
        return error
    where = f"step {ranks.step}" if ranks.step else "while the run started"
    lines = str(error).splitlines() or [type(error).__name__]
    way_out = "lower train.batch_size, or write a budget into the section 'memory'"
    if run.memory is not None and run.memory.has_budget:
        way_out = "lower train.batch_size or memory.budget"
    told = TrainingError(f"{where}: out of memory: {lines[0]}; {way_out}")
    told.__cause__ = error
    return told


def _loop(trainer: Trainer, stop: StopRequest, on_step: Callable[[StepRecord], None] | None) -> Summary:
    """Steps until the last one or a signal; a checkpoint at the end in either case."""
    run, ranks, settings = trainer.run, trainer.ranks, trainer.run.train
    asked: signal.Signals | None = None
    newest = trainer.resumed_from
    records: list[StepRecord] = []
    with contextlib.ExitStack() as stack:
        metrics = plans = None
        if ranks.is_first:
            trainer.say = say_on_stderr
            metrics = MetricsFile(run.output_dir / METRICS, first_step=trainer.step, warn=say_on_stderr)
            stack.callback(metrics.close)
            plans = PlanFiles(run.output_dir, say_on_stderr)
        trainer.say(trainer.description)
        if trainer.resumed_from:
            trainer.say(f"resumed from {trainer.resumed_from}")
        while trainer.step < settings.steps and asked is None:
            ranks.step = trainer.step + 1
            record, asked = trainer.take_step(stop)
            records.append(record)
            if metrics and plans:
                metrics.append(record)
                plans.follow(trainer.tide)
            is_due = len(records) == 1 or trainer.step == settings.steps or trainer.step % settings.log_every == 0
            if is_due or record.num_retries:
                trainer.say(line_of(record, settings.steps))
            if on_step is not None:
                on_step(record)
            is_end = trainer.step == settings.steps or asked is not None
            if is_end or (settings.checkpoint_every and trainer.step % settings.checkpoint_every == 0):
                newest = trainer.save()
        if trainer.step >= settings.steps:
            asked = None  # a signal in the last step came too late to stop anything
        trainer.say(_last_line(trainer, asked, newest))
    later_seconds = sum(record.step_seconds for record in records[1:])
    return Summary(
        steps=trainer.step,
        final_loss=metrics.last_loss if metrics else None,
        losses_sha256=metrics.losses_sha256() if metrics else None,
        weights_sha256=None,
        tokens_per_second=trainer.tokens_per_step * len(records[1:]) / later_seconds if later_seconds else None,
        peak_bytes=max((record.peak_bytes for record in records if record.peak_bytes is not None), default=None),
        peak_resident_bytes=resident_bytes()[1],
        stopped_by=asked.name if asked else None,
        checkpoint=str(newest) if newest else None,
        text_sha256=trainer.corpus.sha256,
        output_dir=str(run.output_dir),
        plan=records[-1].plan if records else None,
    )


def _last_line(trainer: Trainer, asked: signal.Signals | None, newest: Path | None) -> str:
    steps = trainer.run.train.steps
    if asked:
        return f"stopped by {asked.name} after step {trainer.step} of {steps}; saved {newest}; run again to go on"
    if newest == trainer.resumed_from:
        return f"nothing left to do: {newest} has all {steps} steps; raise train.steps to train on"
    return f"done: {steps} steps; saved {newest}"


def _weights_sha256(state: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
