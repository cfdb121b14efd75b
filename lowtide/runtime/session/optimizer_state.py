"""Where a plan's placement of optimizer state would be carried out: the one place that knows it is not.

What: `refuse_moves` is asked by every way in before anything is changed. Plans with `optimizer: swap | auto` can be
made and read; a step with them is not taken.
Cost: nothing. Not covered: moving the state.
"""

from __future__ import annotations

from lowtide.core.decisions import OptimizerPlacement
from lowtide.errors import ConfigError
from lowtide.version import __version__

_VERSION = ".".join(__version__.split(".")[:2])


def refuse_moves(placement: OptimizerPlacement | None) -> None:
    """Raises `ConfigError` where some of the optimizer's state would have to be elsewhere between steps."""
    if placement is not None and placement.moves:
        raise ConfigError(
            f"memory.optimizer: lowtide {_VERSION} plans for state that is elsewhere between steps, and does not move "
            "it yet: write optimizer: keep"
        )
