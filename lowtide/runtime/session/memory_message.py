"""Out of memory in words: what the plan had said, what most of it was, and the one change that would mend that.

What: `plan_message` reads the account of the plan in force. Where it was the loss or a temporary that asked last does
not matter: what is most is what has to be less.
Cost: none until memory runs out. Not covered: an error of backward where nobody wrote `with`; plans by rules, which
predict nothing; memory of others on the device.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.core.plan import Plan
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.units import format_bytes

_CHANGES = {
    "weights": "share the parameters among ranks (FSDP2), or hold them in bf16",
    "gradients": "share the parameters among ranks (FSDP2), or hold them in bf16",
    "optimizer state": "write memory.optimizer: swap",
    "buffers and batch": "use a smaller micro-batch",
    "activations": "write a lower budget: the plan keeps all that fits this one",
    "head, loss, temporaries": "use a smaller micro-batch",
}


def plan_message(plan: Plan) -> str:
    """Two sentences, after a blank; nothing for a plan that predicts nothing."""
    parts = [line for line in plan.account if line.what in _CHANGES]
    if plan.predicted is None or not parts:
        return ""
    most = max(parts, key=lambda line: line.planned_bytes)
    budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
    return (
        f" The plan had said: peak {format_bytes(plan.predicted.peak_bytes)}{budget}, of which {most.what}: "
        f"{format_bytes(most.planned_bytes)}. What would help most: {_CHANGES[most.what]}."
    )


def add_message(error: BaseException | None, describe_floor: Callable[[], str]) -> None:
    """To an error that leaves the `with` block of a handle because memory ran out, say what held it; a forward pass has
    said it of its own. In a plain loop nothing else of lowtide's sees an error of backward."""
    if error is None or not is_out_of_memory(error):
        return
    if not any(note.startswith("lowtide: ") for note in getattr(error, "__notes__", ())):
        error.add_note(
            f"lowtide: out of memory outside of a forward pass (backward, or the optimizer's step). {describe_floor()}"
        )
