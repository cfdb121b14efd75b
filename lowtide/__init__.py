"""lowtide: fit training into the memory you have, at the smallest cost in time, with the same gradients to the bit.

plan(model, batch, "20GiB") says what a budget costs; apply(model, plan) carries a plan out; optimize(model, "20GiB")
does both on the first steps of a training loop. The names below are the whole public surface. Importing this module
imports neither torch nor transformers: each name is loaded when it is first used.
"""

from __future__ import annotations

from lowtide.version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lowtide.core.plan import Plan as Plan
    from lowtide.core.profile import Profile as Profile
    from lowtide.errors import BudgetError as BudgetError
    from lowtide.errors import ConfigError as ConfigError
    from lowtide.errors import PartialStepError as PartialStepError
    from lowtide.loss.checked import cross_entropy as cross_entropy
    from lowtide.optimizer.swap import swap_optimizer as swap_optimizer
    from lowtide.public import apply as apply
    from lowtide.public import current as current
    from lowtide.public import observe as observe
    from lowtide.public import optimize as optimize
    from lowtide.public import remove as remove
    from lowtide.public import selective_offload as selective_offload
    from lowtide.public import write_report as write_report
    from lowtide.runtime.autopilot.plan_model import plan as plan
    from lowtide.runtime.session.tide import Tide as Tide
    from lowtide.weights.load import load as load
    from lowtide.weights.swap import swap_weights as swap_weights

_HOMES = {
    "BudgetError": "lowtide.errors",
    "ConfigError": "lowtide.errors",
    "PartialStepError": "lowtide.errors",
    "Plan": "lowtide.core.plan",
    "Profile": "lowtide.core.profile",
    "Tide": "lowtide.runtime.session.tide",
    "apply": "lowtide.public",
    "cross_entropy": "lowtide.loss.checked",
    "current": "lowtide.public",
    "load": "lowtide.weights.load",
    "observe": "lowtide.public",
    "optimize": "lowtide.public",
    "plan": "lowtide.runtime.autopilot.plan_model",
    "remove": "lowtide.public",
    "selective_offload": "lowtide.public",
    "swap_optimizer": "lowtide.optimizer.swap",
    "swap_weights": "lowtide.weights.swap",
    "write_report": "lowtide.public",
}
"""The module of each public name."""

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605

if not TYPE_CHECKING:  # else every misspelt name would be right

    def __getattr__(name):
        import importlib

        if name not in _HOMES:
            own = importlib.import_module(__name__)  # Python looks for the nearest name in it
            raise AttributeError(f"module 'lowtide' has no attribute {name!r}", name=name, obj=own)
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return list(__all__)
