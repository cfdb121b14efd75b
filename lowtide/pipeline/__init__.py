"""Pipeline schedules: who computes what in which order, proven before it runs, played on a clock, and carried out.

Start at `schedule.py`, the data; `generators.py` writes schedules, `verify.py` proves one, `clock.py` plays one, and
`live_chunks.py` counts what is in flight.
`execute.py` carries one out by torch's pipeline runtime (`torch_stage.py`), over `transport.py`, which moves messages;
`overlap.py` hides its all-to-all; `experts.py` splits experts over ranks; `budget.py` plans the stages of a rank;
`torch_schedules.py` brings all that to a schedule of torch's. Models call `all_to_all` (`exchange.py`), `linear` and
`grouped_linear` (`weight_gradients.py`) as names of this package.
May import: everything below it. Files of schedules and figures are plain Python.
Must not: start a process, a collective or a device before `verify` has passed the schedule.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Overlap": "lowtide.pipeline.overlap",
    "Pipeline": "lowtide.pipeline.execute",
    "WeightGradients": "lowtide.pipeline.weight_gradients",
    "all_to_all": "lowtide.pipeline.exchange",
    "attach": "lowtide.pipeline.torch_schedules",
    "find_ties": "lowtide.pipeline.gradients",
    "fit_stages": "lowtide.pipeline.budget",
    "grouped_linear": "lowtide.pipeline.weight_gradients",
    "linear": "lowtide.pipeline.weight_gradients",
    "same_on_all": "lowtide.pipeline.agree",
    "split_experts": "lowtide.pipeline.experts",
    "start_all_to_all": "lowtide.pipeline.exchange",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
