"""`lowtide profile RUN.yaml`: look at one training step of a run, and save what was seen for `lowtide plan --profile`.

A real step runs on the device of the run, with one micro-batch of its text; with `--fake` nothing runs, and times are a
roofline's. stdout has a short table, or nothing but the profile with `--json`. Exit status: 0, or 2 for a mistake.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator

from lowtide.cli.plan import check_writable
from lowtide.cli.run_file import load_run
from lowtide.cli.waiting import Waiting, width_of_stdout
from lowtide.config.source import write_file
from lowtide.core.plan import OUTSIDE
from lowtide.core.profile import Profile, layer_of
from lowtide.core.text_table import align, layers_label, runs, wrapped
from lowtide.errors import ConfigError
from lowtide.timeline.hardware import load_hardware
from lowtide.units import format_bytes, format_seconds

_NUM_TOP_SITES = 8


def run(args: argparse.Namespace) -> int:
    """Prints, and saves, a profile. Raises `ConfigError` for mistakes."""
    if args.hardware is not None and not args.fake:
        raise ConfigError("--hardware: a real step runs on the device of the run; add --fake, or leave it out")
    settings = load_run(args.run)
    check_writable(args.out)
    hardware = None if args.hardware is None else load_hardware(args.hardware)
    with Waiting() as waiting:
        waiting.say("loading torch")
        from lowtide.cli.run_step import hardware_of_run, observe_run, trace_run

        if args.fake:
            profile = trace_run(settings, hardware or hardware_of_run(settings), say=waiting.say)
        else:
            profile = observe_run(settings, say=waiting.say)
    if args.out is not None:
        write_file(args.out, profile.to_json(), where="--out")
    print("\n".join(profile_lines(profile, width_of_stdout())))
    return 0


def profile_lines(profile: Profile, width: int | None = None) -> list[str]:
    """Layers, and the largest sites, in lines of at most `width` characters."""
    sites = profile.sites
    how = f"traced, times by roofline of {profile.device}" if profile.is_fake else f"observed on {profile.device}"
    lines = [
        f"{profile.model}, one step of {profile.batch}: {how}",
        f"{len(profile.op_names)} operators in {format_seconds(sum(profile.op_seconds))}; {len(sites)} sites save "
        f"{format_bytes(profile.saved_bytes)}",
        "",
        *align(list(_layer_cells(profile)), numeric=(1, 2, 3, 4, 5), width=width),
        "",
    ]
    cells = [("largest sites", "", "made by", "recipe")]
    for site in sorted(sites, key=lambda site: -site.nbytes)[:_NUM_TOP_SITES]:
        recipe = f"no: {site.why_no_recipe}" if site.recipe is None else format_seconds(site.recipe.seconds)
        cells.append((site.name, format_bytes(site.nbytes), site.op, recipe))
    lines += align(cells, numeric=(1,), width=width)
    if profile.hidden:
        lines += ["", "kept by custom functions, out of reach of any plan:"]
        lines += [f"  {entry.name}: {format_bytes(entry.nbytes)}" for entry in profile.hidden]
    return wrapped(lines, width)


def _layer_cells(profile: Profile) -> Iterator[tuple[str, ...]]:
    num_ops, seconds = _by_layer(profile)
    yield "", "operators", "forward", "backward", "saved", "with a recipe"
    groups = [
        (layers_label(profile.layers, first, last), profile.layers[first : last + 1])
        for first, last in runs(profile.layers, profile.signatures)
    ]
    for label, layers in (*groups, (OUTSIDE, (None,))):
        sites = [site for site in profile.sites if site.layer in layers]
        yield (
            label,
            str(sum(num_ops[layer] for layer in layers)),
            format_seconds(sum(seconds[layer, False] for layer in layers)),
            format_seconds(sum(seconds[layer, True] for layer in layers)),
            format_bytes(sum(site.nbytes for site in sites)),
            format_bytes(sum(site.nbytes for site in sites if site.recipe is not None)),
        )


def _by_layer(profile: Profile) -> tuple[Counter[str | None], defaultdict[tuple[str | None, bool], float]]:
    num_ops: Counter[str | None] = Counter()
    seconds: defaultdict[tuple[str | None, bool], float] = defaultdict(float)
    for index, (name, taken) in enumerate(zip(profile.op_names, profile.op_seconds, strict=True)):
        layer = layer_of(name, profile.layers)
        num_ops[layer] += 1
        seconds[layer, index >= profile.num_forward_ops] += taken
    return num_ops, seconds
