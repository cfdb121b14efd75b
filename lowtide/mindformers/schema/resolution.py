"""`recompute_config` and `swap_config` resolved for a model of so many layers: what happens to each part of each layer.

What: `resolve(...)` gives the tables as MindSpore Transformers normalises them, its log lines, and for every layer what
is recomputed and what is swapped, with recompute winning over swap. It looks at names and numbers only.
Where `log_lines` and `layers` differ, the lines follow upstream, `layers` is what happens, and `warnings` says why.
Not covered: carrying any of it out; the newer schema (newer.py).
"""

from __future__ import annotations

from lowtide.mindformers.schema.aliases import family_of
from lowtide.mindformers.schema.grid import Grid, make_grid
from lowtide.mindformers.schema.issues import Issues, layers_text
from lowtide.mindformers.schema.layers import LayerPlan, Resolution, Work, head_lines, report
from lowtide.mindformers.schema.names import Names, trees_of
from lowtide.mindformers.schema.recompute import read_recompute
from lowtide.mindformers.schema.swap import read_swap

__all__ = ["LayerPlan", "Resolution", "resolve", "resolve_sections"]


def resolve(
    recompute_config: object = None,
    swap_config: object = None,
    *,
    num_layers: int,
    pipeline_stage: int = 1,
    pp_interleave_num: int = 1,
    offset: object = 0,
    names: Names | None = None,
    compat: bool = True,
    zero_bubble_v: bool = False,
) -> Resolution:
    """Resolve the two sections for a model of `num_layers` layers.

    `names`: what a layer consists of, `{"feed_forward": {"mul": None, "w1": {...}}}`: None for an operator, a mapping
    for a module; one for all layers or one per layer. Absent: any name matches.
    `compat`: True follows MindSpore Transformers and warns where it hangs, crashes or silently does nothing; False
    refuses there. Raises `ConfigError`; the dotted key is the place.
    `zero_bubble_v`: the second chunk of the pipeline comes back (grid.py), and counts are true, false or tables.
    """
    return resolve_sections(
        recompute_config,
        swap_config,
        num_layers=num_layers,
        pipeline_stage=pipeline_stage,
        pp_interleave_num=pp_interleave_num,
        offset=offset,
        names=names,
        issues=Issues(compat=compat),
        zero_bubble_v=zero_bubble_v,
    )


def resolve_sections(
    recompute_config: object,
    swap_config: object,
    *,
    num_layers: int,
    pipeline_stage: int,
    pp_interleave_num: int,
    offset: object,
    names: Names | None,
    issues: Issues,
    held: range | None = None,
    zero_bubble_v: bool = False,
) -> Resolution:
    """`resolve` for values whose places are known to `issues`. `held`: only these layers, those of one stage."""
    grid = make_grid(num_layers, pipeline_stage, pp_interleave_num, offset, issues, zero_bubble_v=zero_bubble_v)
    trees = trees_of(names, num_layers, issues)
    families = {family_of(tree) for tree in trees}
    family = "mcore" if families == {"mcore"} else "legacy"
    swap = read_swap(swap_config, num_layers, family=family, issues=issues)
    recompute = read_recompute(recompute_config, grid, swap=swap.is_on, family=family, issues=issues)
    indices = range(num_layers) if held is None else held
    work = Work(grid=grid, trees=trees, recompute=recompute, swap=swap, issues=issues, last_layer=indices[-1])
    work.check_patterns()
    layers = [work.layer(index) for index in indices]
    report(work)
    if held is not None:
        _note_other_split(grid, held, issues)
    issues.note_foreign()
    return Resolution(
        num_layers_per_stage=grid.table(),
        normalized=recompute.normalized() | swap.normalized(),
        layers=layers,
        log_lines=[*head_lines(work), *work.lines],
        warnings=issues.warnings,
        notes=issues.notes,
        gathers_again=recompute.gathers_again,
        slices_inputs=recompute.slices_inputs,
    )


def _note_other_split(grid: Grid, held: range, issues: Issues) -> None:
    """Counts are of the file's stages; say so where the module at hand is not one of them."""
    chunk, stage = grid.locate(held[0])
    row, column = grid.cell(held[0])
    first = grid.starts[row][column]
    written = range(first, first + grid.sizes[row][column])
    if held != written and grid.num_stages * grid.num_chunks > 1:
        issues.note(
            f"this module holds {layers_text(held)}, but by the file stage {stage} of chunk {chunk} holds "
            f"{layers_text(written)}; counts are read by the file"
        )
