"""`python -m examples.train RUN.yaml`: train the model of a run file. README.md has the keys and the exit statuses."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from lowtide.cli.main import main
from lowtide.cli.run_file import load_run
from lowtide.config.run import RunConfig
from lowtide.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN.yaml", help="the run file: sections model, data, train, memory")
    parser.add_argument("--steps", type=int, metavar="N", help="instead of train.steps")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="instead of train.output_dir")
    parser.add_argument("--resume", metavar="HOW", help="instead of train.resume: auto, never or a path")


def run(args: argparse.Namespace) -> int:
    """The exit status. Raises `ConfigError` for mistakes in the settings, on the first rank only."""
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        settings = _override(load_run(args.run), args)
        if settings.parallel is not None and not settings.is_sharded:
            what = "'parallel' without 'shard' is planned for, not trained with, in this version"
            settings.fail("parallel", f"{what}; add shard: fsdp2, or remove it to train")
        if is_first:
            _check_folders(settings, args)
        if settings.memory is not None or settings.sections is not None:
            # read when torch is imported: large CPU storages become page-aligned, and disk writes need no bounce buffer
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        from examples.train.trainer import TrainingError, train

        try:
            stopped_by = train(settings)
        except TrainingError as error:
            print(f"lowtide: {error}", file=sys.stderr)
            return 1
    except ConfigError:
        if is_first:
            raise
        return 2  # every rank reads the same file; the first one says what is wrong with it
    return 128 + stopped_by if stopped_by else 0


def _override(settings: RunConfig, args: argparse.Namespace) -> RunConfig:
    changes = {key: value for key in ("steps", "resume") if (value := getattr(args, key)) is not None}
    try:
        train = dataclasses.replace(settings.train, **changes)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None
    return dataclasses.replace(settings, train=train, output_dir=args.output_dir or settings.output_dir)


def _check_folders(settings: RunConfig, args: argparse.Namespace) -> None:
    """A folder that cannot be written is refused now, not after the first hours of training."""
    for key in ("output_dir", "checkpoint_dir"):
        folder = getattr(settings, key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            text = f"{folder} cannot be made or written to: {error.strerror}; choose another folder"
            if key == "output_dir" and args.output_dir is not None:
                raise ConfigError(f"--output-dir: {text}") from None
            settings.fail(f"train.{key}", f"'train.{key}': {text}")


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
