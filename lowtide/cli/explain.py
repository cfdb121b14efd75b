"""`lowtide explain RUN.yaml`: what `recompute_config` and `swap_config` mean, layer by layer and op by op.

What: upstream's log lines, what is worth a warning, and a table: layer, op, fate, bytes, and the rule that won with the
place where it was written. Reads files of lowtide's and of MindSpore Transformers'; no weights and no device.
Bytes are there if the file says how the model is built and trained: its step is then traced with fake tensors, which
takes seconds. Without that nothing heavy is imported.
Exit status: 0, or 2 for a mistake in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from lowtide.cli.run_file import load_run
from lowtide.cli.waiting import Waiting, width_of_stdout
from lowtide.config.run import RunConfig
from lowtide.config.source import read_yaml
from lowtide.core.profile import Profile
from lowtide.core.text_table import wrapped
from lowtide.errors import ConfigError
from lowtide.mindformers.plan import names_of_layers, plan_sections
from lowtide.mindformers.plan_rows import Row, layer_sums, rows_without_step, table
from lowtide.mindformers.schema import Resolution, Sections, read_sections
from lowtide.mindformers.schema.aliases import layer_tree
from lowtide.units import format_bytes


def run(args: argparse.Namespace) -> int:
    """Prints what the sections mean. Raises `ConfigError` for mistakes."""
    root = read_yaml(args.run)
    keys = {entry.key: [inner.key for inner in entry.node.entries] for entry in root.entries}
    is_ours = "train" in keys and bool({"model_type", "path"} & set(keys.get("model", ())))
    settings = load_run(args.run) if is_ours else None
    sections = settings.sections if settings is not None and settings.sections else read_sections(args.run, root)
    profile = None
    if settings is not None and args.num_layers is None:
        profile = _traced(settings)
    resolution = _resolved(sections, profile, args)
    rows = rows_without_step(resolution)
    notes = tuple(_notes_about_ranks(resolution))
    if profile is not None:
        written = plan_sections(profile, resolution, settings.memory if settings else None)
        rows, notes = written.rows, (*notes, *written.notes)
    print(
        _document(resolution, rows, notes)
        if args.json
        else "\n".join(wrapped(_lines(resolution, rows, notes, sections), width_of_stdout())).lstrip()
    )
    return 0


def _notes_about_ranks(resolution: Resolution) -> Iterator[str]:
    """What three flags will do to a model that several ranks share."""
    if resolution.regathers is not None and any(layer.full_recompute for layer in resolution.layers):
        what = "gathered again in backward" if resolution.regathers else "kept whole from forward to backward"
        yield f"parallel_optimizer_comm_recompute: what FSDP2 shards in recomputed layers is {what}"
    if resolution.slices_inputs:
        yield "recompute_slice_activation: tensor-parallel ranks share the inputs of recomputed layers"
    if resolution.keeps_collectives:
        yield "mp_comm_recompute: what collectives give in recomputed layers is kept, and not exchanged again"


def _traced(settings: RunConfig) -> Profile:
    with Waiting() as waiting:
        waiting.say("loading torch")
        from lowtide.cli.run_step import hardware_of_run, trace_run

        return trace_run(settings, hardware_of_run(settings), say=waiting.say)


_OPTIONS = {"num_layers": "--num-layers", "pipeline_stage": "--pp", "pp_interleave_num": "--vpp", "offset": "--offset"}


def _resolved(sections: Sections, profile: Profile | None, args: argparse.Namespace) -> Resolution:
    asked = {"pipeline_stage": args.pp, "pp_interleave_num": args.vpp, "offset": _offset(args.offset)}
    grid: Any = {key: value for key, value in asked.items() if value is not None}
    # A message about a number names the option that says it, also where neither the file nor the command line does.
    said = grid.keys() | ({"num_layers"} if args.num_layers is not None else set())
    own = {key: option for key, option in _OPTIONS.items() if key in said or key not in sections.places}
    sections = dataclasses.replace(sections, places={**sections.places, **own}, **grid)
    if profile is None and args.num_layers is None and sections.num_layers is None:
        raise ConfigError(
            f"--num-layers: {sections.source} does not say how many layers the model has; write --num-layers N"
        )
    if profile is None:
        tree = layer_tree(sections.model_type)
        return sections.resolve(num_layers=args.num_layers, names=tree)
    modules = sorted({name.rpartition(".")[0] for name in profile.op_names if not name.endswith(":backward")})
    names = names_of_layers(modules, profile.layers)
    return sections.resolve(num_layers=len(profile.layers), names=names)


def _offset(text: str | None) -> Any:
    try:
        found = None if text is None else json.loads(text)
    except ValueError:
        found = text
    if isinstance(found, int | list | None):
        return found
    raise ConfigError(
        f"--offset: must be an integer, a list such as '[0, 1]', or lists [chunk][stage] such as '[[0, 1], [1, 0]]', "
        f"not {text}"
    )


# -- what is printed -----------------------------------------------------------------------------------------------


def _lines(resolution: Resolution, rows: tuple[Row, ...], notes: tuple[str, ...], sections: Sections) -> list[str]:
    lines = list(resolution.log_lines)
    remarks = [f"warning: {text}" for text in resolution.warnings]
    remarks += [f"note: {text}" for text in (*resolution.notes, *notes)]
    lines += ["", *remarks] if remarks else []
    if not rows:
        return [*lines, "", "every activation is kept: nothing is recomputed and nothing is swapped"]
    if len(resolution.num_layers_per_stage) > 1 or len(resolution.num_layers_per_stage[0]) > 1:
        lines += ["", "layers of each stage", *_stage_lines(resolution, sections.start_stage)]
    lines += ["", *table(rows, width_of_stdout())]
    sums = layer_sums(rows)
    if sums:
        cells = [f"layer {index}: {format_bytes(m)} moved, {format_bytes(f)} freed" for index, (m, f) in sums.items()]
        total = [sum(pair[place] for pair in sums.values()) for place in (0, 1)]
        lines += ["", *cells, f"in all: {format_bytes(total[0])} moved, {format_bytes(total[1])} freed"]
    return lines


def _stage_lines(resolution: Resolution, start_stage: int) -> list[str]:
    cells: dict[tuple[int, int], list[int]] = {}
    for layer in resolution.layers:
        cells.setdefault((layer.chunk, layer.stage), []).append(layer.index)
    return [
        f"  chunk {chunk}, stage {stage + start_stage}: {layers[0]}-{layers[-1]}"
        for (chunk, stage), layers in cells.items()
    ]


def _document(resolution: Resolution, rows: tuple[Row, ...], notes: tuple[str, ...]) -> str:
    document = dataclasses.asdict(resolution)
    document["notes"] = [*resolution.notes, *notes]
    document["rows"] = [dataclasses.asdict(row) for row in rows]
    document["bytes_by_layer"] = [
        {"layer": index, "moved_bytes": moved, "freed_bytes": freed}
        for index, (moved, freed) in layer_sums(rows).items()
    ]
    return json.dumps(document)
