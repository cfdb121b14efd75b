"""Pipeline schedules: who computes what in which order, proven before it runs, and played on a clock.

Start at `schedule.py`, the data; `generators.py` writes schedules, `verify.py` proves one, `clock.py` plays one.
`exchange.py` has `all_to_all`, which models call as `lowtide.pipeline.all_to_all`; `experts.py` has `split_experts`.
May import: everything below it. Files of schedules are plain Python and import only `errors`.
Must not: start a process, a collective or a device before `verify` has passed the schedule.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"all_to_all": "lowtide.pipeline.exchange", "split_experts": "lowtide.pipeline.experts"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
