"""The two sections as Python values, resolved at once, as most tests need them."""

from __future__ import annotations

from typing import Any

from lowtide.mindformers.schema import Resolution, Sections
from lowtide.mindformers.schema.names import Names


def resolve(
    recompute_config: object = None,
    swap_config: object = None,
    *,
    num_layers: int,
    names: Names | None = None,
    **around: Any,
) -> Resolution:
    """`around`: `compat`, `pipeline_stage`, `pp_interleave_num`, `offset`, `zero_bubble_v`, as `Sections` has them."""
    sections = Sections(written={"recompute_config": recompute_config, "swap_config": swap_config}, **around)
    return sections.resolve(num_layers=num_layers, names=names)
