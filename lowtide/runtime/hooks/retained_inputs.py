"""Retained inputs: tensors that autograd does not save, caught where a module takes them in or gives them out.

What: a recipe may start from a tensor that no operator saves, such as the bf16 input of a norm that saves an fp32 copy
of it. A solved plan names such a tensor by module, side (input or output), leaf (which tensor of them) and call. A
wrapper around the module's forward, of the same kind as those around layers, hands the tensor to the open forward pass
before anything is saved that will be recomputed from it.

Why not module hooks: see runtime/session/forward_patch.py. Also, a copy of the model would have these hooks too.

Cost: 5 us a call of a module with retained inputs. Not covered: tensors inside objects that `torch.utils._pytree` does
not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.runtime.hooks.forward_pass import ForwardPass
from lowtide.runtime.recompute.recipe_nodes import Node
from lowtide.tensors.private import tree_leaves


class RetainedInputs:
    """The retained inputs of one module."""

    def __init__(self, name: str, nodes: Iterable[Node]) -> None:
        self.name = name
        self._points: dict[tuple[str, int], list[Node]] = {}
        for node in nodes:
            retained_input = node.decision.retained_input
            assert retained_input is not None
            self._points.setdefault((retained_input.side, retained_input.call), []).append(node)
        self._has_inputs = any(side == "input" for side, _ in self._points)

    def around(self, find_pass: Callable[[], ForwardPass | None]) -> Callable[[Callable, tuple, dict], Any]:
        """A wrapper for `ForwardPatch`."""

        def around(forward: Callable, args: tuple, kwargs: dict) -> Any:
            forward_pass = find_pass()
            if forward_pass is None:
                return forward(*args, **kwargs)
            call = forward_pass.count_call(self.name)
            # Also without gradients, and inside someone else's checkpoint region: recipes need only the bytes.
            if self._has_inputs:
                self._catch(forward_pass, "input", call, (args, kwargs))
            output = forward(*args, **kwargs)
            self._catch(forward_pass, "output", call, output)
            return output

        return around

    def _catch(self, forward_pass: ForwardPass, side: str, call: int, tree: Any) -> None:
        nodes = self._points.get((side, call))
        if nodes is None:
            return
        leaves = tree_leaves(tree)
        for node in nodes:
            assert node.decision.retained_input is not None
            leaf = node.decision.retained_input.leaf
            found = leaves[leaf] if leaf < len(leaves) else None
            forward_pass.catch(node, found if isinstance(found, torch.Tensor) else None)


def retained_input_points(nodes: Iterable[Node], modules: dict[str, nn.Module]) -> list[RetainedInputs]:
    """The retained inputs of a solved plan by module. Raises ConfigError for a module that the model does not have."""
    by_module: dict[str, list[Node]] = {}
    for node in nodes:
        retained_input = node.decision.retained_input
        if retained_input is None:
            continue
        if retained_input.module not in modules:
            raise ConfigError(
                f"lowtide.apply: retained input '{node.name}' of the plan is at module '{retained_input.module}', "
                "which this model does not have; the plan was made for another model, plan again"
            )
        by_module.setdefault(retained_input.module, []).append(node)
    return [RetainedInputs(name, members) for name, members in by_module.items()]
