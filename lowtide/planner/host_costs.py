"""What lowtide's own Python costs in a step, beside the operators that a plan asks for.

What: `HostCosts` has three prices, and `HOST_COSTS` what they are on a server's cores. `charged` puts that of a recipe
into a profile, so that solver, timeline and prediction all see it.

Why a number of its own: the price of a recipe is the time of its operators, 0.14 ms for a norm's product of 2 MiB.
What stands around it (finding its inputs, the graph's hook, comparing fingerprints) takes as long again or longer: a
plan of many small recipes was promised a fiftieth of a step and took a tenth.

Where the figures come from: steps of 70 and of 370 ms on two cores (Llama and Qwen3-MoE, four layers; 12 to 52 recipes,
one layer that runs again), plain and planned in turn. With large tensors Python's own memory has left the cache each
time, so they are two to three times those of toy models (docs/history/LOG.md, "What swapping and recipes cost a CPU").

On an accelerator the host runs ahead of the device, so recipes and layers have no such price there; not yet measured on
a GPU. Cost: one pass over the nodes.
Not covered: what each machine takes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lowtide.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds. All zero: a runtime that takes no time, as on a virtual clock."""

    op_seconds: float = 0.0
    """For each operator of a forward pass whose recipes are proved (recipes/proof.py)."""
    recipe_seconds: float = 0.0
    """For each recipe that runs."""
    layer_seconds: float = 0.0
    """For each layer that runs again as a whole."""

    def on(self, device: str) -> HostCosts:
        """Those that show in a step on this device."""
        return self if device == "cpu" else HostCosts(op_seconds=self.op_seconds)


NO_COSTS = HostCosts()
HOST_COSTS = HostCosts(op_seconds=25e-6, recipe_seconds=0.5e-3, layer_seconds=2.5e-3)


def charged(profile: Profile, costs: HostCosts) -> Profile:
    """The profile of the same step, whose recipes take so much longer."""
    if not costs.recipe_seconds:
        return profile
    nodes = []
    for node in profile.nodes:
        recipe = node.recipe
        if recipe is not None:
            recipe = dataclasses.replace(recipe, seconds=recipe.seconds + costs.recipe_seconds)
        nodes.append(dataclasses.replace(node, recipe=recipe))
    return dataclasses.replace(profile, nodes=tuple(nodes))
