"""Time several variants of one training step side by side, so that noise falls on all of them alike.

Each variant is a process of its own that stays alive: the parent asks them in turn for one step (A B C A B C ...), so
that slow minutes of a shared machine hit every variant, and ratios are taken round by round. A process of its own also
keeps each variant's peak of resident memory apart.

The child talks JSON lines on its standard output: one when it is ready, one per step, one at the end.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Variant:
    """One way to run the step: the arguments of its child process, and what it answered."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    ready: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    process: subprocess.Popen[str] | None = None


def run_interleaved(module: str, variants: Sequence[Variant], num_rounds: int) -> None:
    """Start all children, then ask each for one step per round. Fills `steps`; a child that fails has `error`."""
    for variant in variants:
        _start(module, variant)
    try:
        for index in range(num_rounds):
            for variant in variants:
                _ask(variant)
            latest = ", ".join(f"{v.name} {v.steps[-1]['seconds']:.2f} s" for v in variants if v.steps and not v.error)
            print(f"round {index + 1}/{num_rounds}: {latest}", file=sys.stderr, flush=True)
    finally:
        for variant in variants:
            _stop(variant)


def _start(module: str, variant: Variant) -> None:
    variant.process = subprocess.Popen(
        [sys.executable, "-m", module, "--child", *variant.arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variant.environment},
        cwd=Path(__file__).resolve().parent.parent,
    )
    answer = _read(variant)
    if answer is not None:
        variant.ready = answer
        print(f"{variant.name}: ready", file=sys.stderr, flush=True)


def _ask(variant: Variant) -> None:
    if variant.error is not None or variant.process is None or variant.process.stdin is None:
        return
    variant.process.stdin.write("step\n")
    variant.process.stdin.flush()
    answer = _read(variant)
    if answer is not None:
        variant.steps.append(answer)


def _read(variant: Variant) -> dict[str, Any] | None:
    process = variant.process
    assert process is not None
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answer = json.loads(line)
            if "error" in answer:
                variant.error = answer["error"]
                return None
            return answer
    variant.error = f"the process ended with status {process.wait()}"
    return None


def _stop(variant: Variant) -> None:
    process = variant.process
    if process is None:
        return
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(make_step) -> None:
    """The child's side: answer each line with one step's figures, until the parent closes the pipe."""
    try:
        step, ready = make_step()
        print(json.dumps(ready), flush=True)
        for _ in sys.stdin:
            print(json.dumps(step()), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


def ratio(variant: Variant, base: Variant, key: str = "seconds", skip: int = 2) -> dict[str, float]:
    """Median, minimum and maximum over rounds of `variant / base`, without the first `skip` rounds."""
    pairs = list(zip(variant.steps, base.steps, strict=False))[skip:]
    ratios = [ours[key] / theirs[key] for ours, theirs in pairs]
    if not ratios:
        return {}
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def median(variant: Variant, key: str, skip: int = 2) -> float | None:
    values = [step[key] for step in variant.steps[skip:] if step.get(key) is not None]
    return statistics.median(values) if values else None
