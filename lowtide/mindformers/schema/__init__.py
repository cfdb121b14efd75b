"""MindSpore Transformers' `recompute_config` and `swap_config`, read as they are.

What: `Sections` has the two sections as Python values; `read_sections(...)` reads them from a YAML file that has them
beside other sections. Its `resolve(...)`, for the model at hand, gives a `Resolution`: what is
recomputed and what is swapped in every layer, upstream's tables and log lines, and warnings. Nothing here imports
torch, and nothing is carried out (mindformers/plan.py and mindformers/follow.py do that).

`compat` (the default) follows upstream's results and warns where it hangs, crashes on a documented form or silently
does nothing; without it these places are refused, with where, what and how to fix it.

The newer schema (`recompute: {mode: ...}`, `swap: {enable: ...}`) is read from a file or by `Sections(written=...)`.
Not covered: the log lines of that one.

Start at `file.py`. May import: `config`, `errors`, `units`. Must not:
import torch, plan anything, or look at a model.
"""

from __future__ import annotations

from lowtide.mindformers.schema.file import Sections, has_sections, read_sections
from lowtide.mindformers.schema.layers import LayerPlan, Resolution

__all__ = ["LayerPlan", "Resolution", "Sections", "has_sections", "read_sections"]
