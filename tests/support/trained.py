"""What a run of the trainer leaves in its folder: the loss of each step, and the weights of its newest checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def steps_of(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def losses(folder: str | Path) -> list[float]:
    return [step["loss"] for step in steps_of(folder)]


def weights_sha256(folder: str | Path) -> str:
    """Of each tensor of the model in each file of the newest checkpoint; equal for runs on as many ranks that have the
    same bits."""
    newest = max(Path(folder, "checkpoints").glob("step-*"))
    digest = hashlib.sha256()
    for file in sorted(newest.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(name for name in tensors.keys() if name.startswith("model.")):  # noqa: SIM118
                digest.update(f"{file.name} {name}".encode())
                digest.update(tensors.get_tensor(name).reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def bits_of(folder: str | Path) -> tuple[list[float], str]:
    """Losses, and a hash of the weights at the end."""
    return losses(folder), weights_sha256(folder)
