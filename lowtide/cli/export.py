"""`lowtide export PLAN.json --to SYSTEM --profile FILE`: the nearest setting that another framework has.

Reads a plan that `lowtide plan --out` wrote, and the profile that it was made for; needs no model and no torch. stdout
has the setting, after what it cannot say as comments. Exit status: 0, or 2 for a mistake.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.cli.diff import read_plan
from lowtide.cli.plan import check_writable, write
from lowtide.config.source import read_text
from lowtide.errors import ConfigError
from lowtide.units import MIB

_MOST_PROFILE_BYTES = 256 * MIB
SYSTEMS = ("transformers", "megatron", "mindspeed", "torchtitan", "mindformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="a plan, as `lowtide plan --out` writes it")
    parser.add_argument("--to", choices=SYSTEMS, required=True, help="the framework")
    parser.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="the profile that the plan was made for"
    )
    parser.add_argument("--hardware", metavar="NAME", help="whose link carries copies: h200, ascend910b, ...")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there, instead of to stdout")


def run(args: argparse.Namespace) -> int:
    """Prints, or writes, the setting. Raises `ConfigError` for mistakes."""
    from lowtide.core.profile import Profile
    from lowtide.report.export import export
    from lowtide.timeline.hardware import load_hardware

    plan = read_plan(args.plan)
    try:
        profile = Profile.from_json(read_text(args.profile, most_bytes=_MOST_PROFILE_BYTES))
    except ConfigError as error:
        raise ConfigError(f"--profile: {args.profile}: {str(error).removeprefix(f'{args.profile}: ')}") from None
    if args.hardware is None and not profile.is_fake:
        raise ConfigError(
            f"--hardware: the profile was observed on {profile.device}, and says nothing of the link of that machine; "
            "name its hardware, such as --hardware h200"
        )
    check_writable(args.out)
    text = export(plan, args.to, profile, link=load_hardware(args.hardware or profile.device).link)
    if args.out is not None:
        write(args.out, text)
    else:
        print(text, end="")
    return 0
