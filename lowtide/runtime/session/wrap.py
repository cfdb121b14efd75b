"""The forward passes of a model under a plan: what is wrapped, and how a forward pass is entered.

What: one wrapper on the model, on each layer, on each module that is to be recomputed, and on each that a retained
input is caught at. The outermost that runs opens a `ForwardPass` (hooks/forward_pass.py), which sees every saved
tensor until it returns; those inside it find that forward pass and say where the forward pass is.

A pattern may name an operator, and operators are known only after a forward pass has run; such patterns are checked at
the end of the first forward, everything else before (apply.py).

Where saved-tensor hooks are active, PyTorch raises an error in `grad`, `vjp`, `jacrev` and `hessian` of `torch.func`,
whoever set the hooks. (`vmap` and `jvp` work.) So a layer that uses these inside runs without hooks: what it saves
stays, whatever the plan says, and a warning names it. The first forward finds out: the layer's forward starts and
raises; everything that it changed is restored, and it runs again without hooks. Later forwards run it so at once.

A recipe may start from a *retained input*: a tensor that no operator saves, such as the bf16 input of a norm that saves
an fp32 copy of it. A solved plan names it by module, side (input or output), leaf (which tensor of them) and call; a
wrapper hands it to the open forward pass before anything is saved that will be recomputed from it.

Cost: some microseconds for each wrapped module that is called, and one walk over each layer in the first forward. Not
covered: what happens to a saved tensor (forward_pass.py); retained inputs inside objects that `torch.utils._pytree`
does not know; a layer that begins to use `torch.func` after its first forward, or that writes to its inputs before: it
is refused by name once, and runs from then on.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Rule, Rules, unmatched_error
from lowtide.engines.base import Engine
from lowtide.errors import ConfigError
from lowtide.profiling.observe_call import is_training
from lowtide.profiling.observe_step import NO_HOOKS
from lowtide.runtime.hooks.context import LayerTable, PlanContext
from lowtide.runtime.hooks.first_forward import warn_about_idle_regions, warn_about_other_sites, warn_about_small_sites
from lowtide.runtime.hooks.forward_pass import ForwardPass
from lowtide.runtime.recompute.recipe_graph import Node
from lowtide.runtime.saved.handle import is_checkpoint_hook, open_handle
from lowtide.runtime.session.forward_patch import UnobservedForwards
from lowtide.tensors.compiled import ForwardPatch, compiled_parts, how_compiled, lies_in, refuse_compiled
from lowtide.tensors.private import (
    are_transforms_active,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
    tree_leaves,
    version_of,
)
from lowtide.tensors.remembered import PLAIN
from lowtide.tensors.snapshot import host_generators, take

Around = Callable[[Callable, tuple, dict], Any]
Points = dict[tuple[str, int], list[Node]]
"""The retained inputs of a module, by side ("input", "output") and by how often it was called before."""


class PlannedForwards:
    """The wrappers of one plan on the model of `context`, in the name of `handle`. They are on from the start."""

    def __init__(
        self, plan: Plan, context: PlanContext, engine: Engine, unobserved: UnobservedForwards, handle: Any
    ) -> None:
        self._plan = plan
        self._handle = handle
        self._context = context
        self._model = context.model
        self._engine = engine
        self._unobserved = unobserved
        """Is told of each forward pass."""
        self._local = threading.local()
        """Of each thread: the forward pass of the forward pass that it is in."""
        self._writing = threading.RLock()
        """Of the thread in whose forward pass the first tables are written; others wait, and follow them."""
        self._unchecked: Sequence[Rule] = ()
        self._warn: Callable[[PlanContext], None] | None = None
        self._compiled = compiled_parts(self._model)
        self._patches = self._wrap()

    def check_first(self, rules: Sequence[Rule], *, is_solved: bool) -> None:
        """At the end of the first forward: that each of these rules matched, and that the sites are the plan's; or, of
        a plan by rules, that each moves something."""
        self._unchecked = rules
        self._warn = warn_about_other_sites if is_solved else warn_about_small_sites

    def take_off(self) -> None:
        """Leave the model as it was. Idempotent."""
        for patch in reversed(self._patches):
            patch.undo()

    def reapply(self) -> None:
        """After `take_off`; the model must be as it was then."""
        self._patches = [patch.reapply() for patch in self._patches]

    def _wrap(self) -> list[ForwardPatch]:
        modules = dict(self._model.named_modules())
        layers = self._plan.layers
        patches = []
        # Innermost of all: around the compiled code alone.
        for name, module in self._compiled.items():
            patches.append(ForwardPatch(module, self._around(ForwardPass.run_compiled, name)))
        # Innermost: a retained input of a layer, or of the model, is caught inside its region.
        for name, points in _retained_input_points((self._context.nodes or {}).values(), modules).items():
            patches.append(ForwardPatch(modules[name], self._around(_catching, (name, points))))
        for name in recomputed_modules(modules, self._plan):
            module = modules[name]
            # Of a compiled module the output stays: it comes from another graph where nothing is saved.
            is_leaf = next(module.children(), None) is None and how_compiled(module) is None
            patches.append(ForwardPatch(module, self._around(_run_region, (module, is_leaf))))
        for name in layers:
            handle = self._handle if name == "" else None
            patches.append(ForwardPatch(modules[name], self._around_region(name, modules[name]), handle))
        if "" not in layers:
            patches.append(ForwardPatch(self._model, self._around_region("", self._model), self._handle))
        return patches

    def _around(self, call: Callable[..., Any], given: Any) -> Around:
        """Inside a forward pass, `call` on it, what is `given`, the forward and its arguments; outside of one, a layer
        begins it. Graphs hold a recomputed layer, and its patch with it: if that led to the model, one that keeps its
        last output would never die. The patch of the model itself holds this object, through its handle."""
        weak = weakref.ref(self)

        def around(forward: Callable, args: tuple, kwargs: dict) -> Any:
            planned = weak()
            forward_pass = None if planned is None else planned._open()
            if forward_pass is not None:
                return call(forward_pass, given, forward, args, kwargs)
            if planned is None or not isinstance(given, LayerTable):
                return forward(*args, **kwargs)
            return planned._enter(given, forward, args, kwargs)

        return around

    def _around_region(self, name: str, module: nn.Module) -> Around:
        rules = self._plan.rules
        is_recomputed = name in self._plan.layers and rules.decide(name, is_site=False).fate is Fate.RECOMPUTE
        fallback = self._context.stay_rules.decide(name, is_site=False)
        return self._around(_run_layer, LayerTable(name, module, is_recomputed, fallback))

    def _open(self) -> ForwardPass | None:
        return getattr(self._local, "forward_pass", None)

    def _enter(self, layer: LayerTable, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """A forward pass, from its beginning to its end; `forward` alone where lowtide steps aside."""
        context = self._context
        if torch.compiler.is_compiling() or not is_training():
            self._unobserved.step_aside()
            return forward(*args, **kwargs)
        if not layer.tables:
            refuse_compiled(self._model, "lowtide.apply")  # before a table is written, also anew
        refuse_capture(self._model, self._engine)
        hooks = top_saved_tensors_hooks()
        if is_checkpoint_hook(hooks):
            context.counters.num_skipped_calls += 1
            self._unobserved.step_aside()
            return forward(*args, **kwargs)
        if hooks is not None:
            raise foreign_hooks_error(hooks)
        if context.guard is not None:
            context.guard.begin()
        self._unobserved.end()
        with contextlib.nullcontext() if layer.tables else self._writing:
            return self._run_pass(layer, forward, args, kwargs)

    def _run_pass(self, layer: LayerTable, forward: Callable, args: tuple, kwargs: dict) -> Any:
        context = self._context
        forward_pass = ForwardPass(context, layer)
        generators = [*host_generators()] if context.watches and not context.has_drawn.is_set() else []
        self._local.forward_pass = forward_pass
        is_complete = False
        try:
            with (
                forward_pass.log or contextlib.nullcontext(),
                forward_pass.inside(layer),
                torch.autograd.graph.saved_tensors_hooks(forward_pass.pack_hook, open_handle),
            ):
                output = _run(forward_pass, layer, forward, args, kwargs)
            is_complete = True
        finally:
            self._local.forward_pass = None
            forward_pass.close(is_complete=is_complete)
            if not all(each.is_same() for each in generators):
                context.has_drawn.set()
        context.counters.num_forwards += 1
        if self._unchecked and layer.tables:
            self._check_ops(is_whole=layer.name == "")
        if self._warn is not None and layer.name == "" and layer.tables:
            warn, self._warn = self._warn, None
            warn(context)
            warn_about_idle_regions(context)
        return output

    def _check_ops(self, is_whole: bool) -> None:
        """After the first forward, every name is known: a rule that matched nothing is an error now."""
        names = self._context.seen_names | set(dict(self._model.named_modules()))
        self._unchecked = Rules(tuple(self._unchecked)).unmatched(names) if is_whole else self._unchecked
        if not is_whole or not self._unchecked:
            return
        rule, self._unchecked = self._unchecked[0], []
        raise unmatched_error(rule, sorted(names))


def _run_layer(now: ForwardPass, layer: LayerTable, forward: Callable, args: tuple, kwargs: dict) -> Any:
    if layer.name == "" or not now.is_innermost() or are_transforms_active():
        return forward(*args, **kwargs)
    with now.inside(layer):
        output = _run(now, layer, forward, args, kwargs)
    if now.context.guard is not None:
        now.context.guard.check(now.context.scheduler.engine.device)
    return output


def _catching(now: ForwardPass, given: tuple[str, Points], forward: Callable, args: tuple, kwargs: dict) -> Any:
    name, points = given
    call = now.next_call("retained input", name)
    # Also without gradients, and inside someone else's checkpoint region: recipes need only the bytes.
    now.catch(points.get(("input", call), ()), (args, kwargs))
    output = forward(*args, **kwargs)
    now.catch(points.get(("output", call), ()), output)
    return output


def _run_region(now: ForwardPass, given: tuple[nn.Module, bool], forward: Callable, args: tuple, kwargs: dict) -> Any:
    if not torch.is_grad_enabled() or not now.is_innermost() or are_transforms_active():
        return forward(*args, **kwargs)
    module, is_leaf = given
    run = now.regions.discarded if is_leaf else now.regions.checkpointed
    return run(now, module, forward, args, kwargs)


def _run(forward_pass: ForwardPass, layer: LayerTable, forward: Callable, args: tuple, kwargs: dict) -> Any:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if layer.is_recomputed and torch.is_grad_enabled():
            return forward_pass.regions.checkpointed(forward_pass, layer.module, forward, args, kwargs)
        return forward(*args, **kwargs)

    return run_allowing_transforms(layer, hooked, forward, (args, kwargs))


def recomputed_modules(modules: dict[str, nn.Module], plan: Plan) -> list[str]:
    """Modules, outermost first, that a recompute rule names and that are neither layers nor around or in such a one."""
    rules = plan.rules
    chosen: list[str] = []
    compiled = [name for name, module in modules.items() if how_compiled(module) is not None]
    for name in modules:
        if lies_in(name, compiled):
            continue
        if not name or name in plan.layers or any(layer.startswith(name + ".") for layer in plan.layers):
            continue
        decision = rules.decide(name, is_site=False)
        if decision.fate is not Fate.RECOMPUTE or decision.rule is None:
            continue
        layer = next((layer for layer in plan.layers if name.startswith(layer + ".")), None)
        if layer is None and decision.rule.pattern.text == "*":
            continue
        if layer is not None and rules.decide(layer, is_site=False).fate is Fate.RECOMPUTE:
            continue
        if not any(name.startswith(outer + ".") for outer in chosen):
            chosen.append(name)
    return chosen


def _retained_input_points(nodes: Iterable[Node], modules: dict[str, nn.Module]) -> dict[str, Points]:
    """The retained inputs of a solved plan by module. Raises ConfigError for a module that the model does not have."""
    by_module: dict[str, Points] = {}
    for node in nodes:
        retained_input = node.decision.retained_input
        if retained_input is None:
            continue
        if retained_input.module not in modules:
            raise ConfigError(
                f"lowtide.apply: retained input '{node.name}' of the plan is at module '{retained_input.module}', "
                "which this model does not have; the plan was made for another model, plan again"
            )
        points = by_module.setdefault(retained_input.module, {})
        points.setdefault((retained_input.side, retained_input.call), []).append(node)
    return by_module


def module_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def matches_a_module(rule: Rule, names: list[str]) -> bool:
    return any(rule.pattern.matches(name, is_site=False) for name in names)


def rules_about_ops(model: nn.Module, plan: Plan) -> list[Rule]:
    """Rules that match no module: they may still match operators, which the first forward shows."""
    names = module_names(model)
    return [rule for rule in plan.rules.rules if not matches_a_module(rule, names) and rule.pattern.text != "*"]


def refuse_capture(model: nn.Module, engine: Engine) -> None:
    """Raise where the forward is not run but recorded, as a graph that the device replays."""
    if engine.is_capturing():
        raise ConfigError(
            f"lowtide: a graph of the device is being captured around the forward of {type(model).__name__}; a replay "
            "would copy to host memory that belongs to another step by then. Call remove() on the tide before the "
            "capture, or capture nothing that is trained under a plan."
        )


def foreign_hooks_error(hooks: tuple[Callable, Callable]) -> ConfigError:
    """For a model that is called inside saved-tensor hooks that are not lowtide's."""
    name = f"{getattr(hooks[0], '__module__', '?')}.{getattr(hooks[0], '__qualname__', '?')}"
    return ConfigError(
        f"lowtide: the model was called inside other saved-tensor hooks ({name}). PyTorch calls only the innermost "
        "pair, so those would see nothing. Leave them out, enter them around single modules inside the model, or call "
        "tide.remove() first."
    )


# -- layers that use torch.func ----------------------------------------------------------------------------------------


def run_allowing_transforms(
    layer: LayerTable, hooked: Callable[..., Any], forward: Callable, given: tuple[tuple, dict]
) -> Any:
    """`hooked` on the arguments `given`, or `forward` where hooks are in the way.

    Called inside hooks of ours, and no other.
    """
    args, kwargs = given
    if layer.uses_transforms:
        with _without_hooks():
            return forward(*args, **kwargs)
    go_back = _way_back(layer, given) if not layer.tables else None
    try:
        return hooked(*args, **kwargs)
    except RuntimeError as error:
        if NO_HOOKS not in str(error):
            raise
        layer.uses_transforms = True
        where = f"'{layer.name}'" if layer.name else "the model"
        if go_back is None or not go_back():
            raise RuntimeError(
                f"lowtide: {where} used torch.func (grad, vjp, jacrev or hessian) in this forward, but not in its "
                "first one, or only after it had written to its inputs or to a large buffer; PyTorch does not allow "
                f"saved-tensor hooks around it. Run this step again: what {where} saves is left to plain autograd from "
                "now on."
            ) from error
    warnings.warn(
        f"lowtide: {where} uses torch.func (grad, vjp, jacrev or hessian), around which PyTorch allows no saved-tensor "
        "hooks: what it saves stays on the device, whatever the plan says.",
        stacklevel=2,
    )
    with _without_hooks():
        return forward(*args, **kwargs)


def _way_back(layer: LayerTable, given: tuple[tuple, dict]) -> Callable[[], bool]:
    """What puts back all that a forward may change; False, and nothing is, if inputs or large buffers were written to:
    these have no copies."""
    leaves = tree_leaves(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    versions = [(tensor, version_of(tensor)) for tensor in tensors if not tensor.is_inference()]
    beside = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN]
    state = take(layer.module, beside=beside or None, code=True, devices={tensor.device for tensor in tensors})

    def go_back() -> bool:
        if state.lost() or any(version_of(tensor) != version for tensor, version in versions):
            return False
        state.restore()
        return True

    return go_back


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Inside, the innermost saved-tensor hooks are switched off."""
    hooks = top_saved_tensors_hooks()
    assert hooks is not None
    pop_saved_tensors_hooks()
    try:
        yield
    finally:
        push_saved_tensors_hooks(*hooks)
