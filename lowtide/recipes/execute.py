"""Programs: a recipe made ready to run, many times.

What: operators are looked up and constants decoded once; a run is then one Python call per step. It happens below
autograd and autocast: the recorded operators already ran there, and nothing of a run may be saved or cast again. An
intermediate result is released as soon as the last step that reads it has run.

Contract: from the bytes that the observed step had, the result's storage holds the bytes that it had.

Cost: about 1 us a step beside the operator itself, 3 us a run. Not covered: where inputs come from, and whether their
shapes are still those that the recipe was written for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.core.recipe import Recipe
from lowtide.errors import ConfigError
from lowtide.tensors.private import AutoDispatchBelowAutograd, DisableAutocast, tree_leaves

# Where a run keeps what steps read: the device first, then the inputs, then the results.
_DEVICE = 0


class _Register(int):
    """A place in the table of a run, to tell it from a number."""


class CompiledRecipe:
    """A recipe that can be run."""

    __slots__ = ("_num_inputs", "_num_registers", "_result", "_results", "_steps")

    def __init__(self, recipe: Recipe) -> None:
        """Raises ConfigError if it names an operator that this torch does not have."""
        self._num_inputs = len(recipe.inputs)
        self._num_registers = 1 + self._num_inputs
        self._results: dict[tuple[int, int], _Register] = {}
        """By step and output."""
        self._steps: list[_Step] = []
        last: dict[int, _Step] = {}
        for step in recipe.steps:
            args = [self._decode(arg) for arg in step.args]
            compiled = _Step(find_operator(step.op), args, {key: self._decode(arg) for key, arg in step.kwargs.items()})
            for leaf in tree_leaves((args, compiled.kwargs)):
                if isinstance(leaf, _Register):
                    last[leaf] = compiled
            self._steps.append(compiled)
        self._result = self._register_of(len(recipe.steps) - 1, recipe.output)
        for register, reader in last.items():
            if register not in (_DEVICE, self._result):
                reader.clears.append(register)

    def _register_of(self, step: int, output: int) -> _Register:
        """The register of a result, which exists from the first time that somebody asks for it."""
        if (step, output) not in self._results:
            register = self._results[step, output] = _Register(self._num_registers)
            self._num_registers += 1
            self._steps[step].stores.append((output, register))
        return self._results[step, output]

    def _decode(self, arg: Any) -> Any:
        """A constant, or where the run finds what is meant."""
        if isinstance(arg, (list, tuple)):
            return [self._decode(item) for item in arg]
        if not isinstance(arg, dict):
            return arg
        if "input" in arg:
            return _Register(1 + arg["input"])
        if "step" in arg:
            return self._register_of(arg["step"], arg["output"])
        if "device" in arg:
            return _Register(_DEVICE)
        if "float" in arg:
            return float(arg["float"])
        (name,) = arg.values()
        return getattr(torch, name)

    def run(self, inputs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """A tensor on the storage that the recipe makes. Inputs have the geometry of the recipe's, in its order."""
        assert len(inputs) == self._num_inputs, "a recipe got another number of inputs than it has"
        registers: list[Any] = [None] * self._num_registers
        registers[_DEVICE] = device
        registers[1 : 1 + self._num_inputs] = inputs
        # With gradients, as the operators ran: some ask (oneDNN's LSTM then gives its workspace). Nothing is recorded.
        with torch.enable_grad(), DisableAutocast(), AutoDispatchBelowAutograd():
            for step in self._steps:
                step.run(registers)
        result = registers[self._result]
        if result is None:
            raise RuntimeError("lowtide: an operator of a recipe gave no tensor where it gave one before")
        return result


class _Step:
    """One operator: its constants, where its tensors come from, and which registers to write and to clear."""

    __slots__ = ("args", "clears", "kwargs", "named", "nested", "op", "places", "stores")

    def __init__(self, op: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.places = [(position, arg) for position, arg in enumerate(args) if isinstance(arg, _Register)]
        self.nested = [(position, arg) for position, arg in enumerate(args) if isinstance(arg, list) and _reads(arg)]
        self.named = [(key, arg) for key, arg in kwargs.items() if _reads(arg)]
        self.stores: list[tuple[int, int]] = []
        self.clears: list[int] = []

    def run(self, registers: list[Any]) -> None:
        args, kwargs = self.args.copy(), self.kwargs
        for position, register in self.places:
            args[position] = registers[register]
        for position, given in self.nested:
            args[position] = _fill(given, registers)
        if self.named:
            kwargs = {**kwargs, **{key: _fill(given, registers) for key, given in self.named}}
        result = self.op(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            for _, place in self.stores:
                registers[place] = result
        else:
            leaves = tree_leaves(result)
            for output, place in self.stores:
                registers[place] = leaves[output]
        for place in self.clears:
            registers[place] = None


def _reads(arg: Any) -> bool:
    return any(isinstance(leaf, _Register) for leaf in tree_leaves(arg))


def _fill(arg: Any, registers: list[Any]) -> Any:
    if isinstance(arg, list):
        return [_fill(item, registers) for item in arg]
    return registers[arg] if isinstance(arg, _Register) else arg


def find_operator(name: str) -> Any:
    """The operator `aten.mul.Tensor`. Raises ConfigError if this torch does not have it."""
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise ConfigError(
            f"recipe: this torch ({torch.__version__}) has no operator '{name}'; "
            "profile the model again with the torch that trains it"
        ) from None
