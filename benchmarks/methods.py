"""Every way to save activation memory that the questions compare: lowtide, and the real packages that people use.

What: a `Method` changes a `Subject` so that its step runs that way, and returns a `Running`: how to read its counters
and how to measure its peak, where the plain way does not do. Imports happen inside, after `Method.packages` was looked
up: a package that is missing, or refuses to run here, is an error of one row and nothing else.
Why the real packages: a baseline that we wrote ourselves proves little.
Cost: that of the method. Not covered: optimizer state (torchao's and bitsandbytes' optimizers), pipelines.

What `setting` means: for lowtide, the fewest layers and sac_ilp a share of the bytes that plain autograd saves, met by
a budget in bytes; for torch.compile the package's own `activation_memory_budget`; for every n-th layer, n.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from benchmarks.children import CannotRunError
from benchmarks.peaks import Running
from benchmarks.subjects import Subject

TILED = "tiled MLP + chunked loss by hand"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run a step. `prepare(subject, setting, budget_bytes)` changes the subject in place."""

    name: str
    prepare: Callable[[Subject, float | None, int | None], Running]
    packages: tuple[str, ...] = ()
    """PyPI names; the first is the one that the row names."""
    is_exact: bool = True
    """Whether it claims plain's gradients to the bit."""
    needs_budget: bool = False
    limit_factor: float = 1.0
    """How much longer than others it may take to prepare."""
    note: str = field(default="")

    def title(self, setting: float | None) -> str:
        """Method and setting, for people."""
        if setting is None:
            return self.name
        return f"{self.name} {setting:.0%}" if setting <= 1 else f"{self.name} {setting:.0f}"


def version_of(method: Method) -> str | None:
    """'name version' of the package behind a method. Raises CannotRunError for the first one that is missing."""
    found = []
    for package in method.packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            if package == "lowtide":  # run from a checkout
                import lowtide

                found.append(f"lowtide {lowtide.__version__}")
                continue
            raise CannotRunError(f"not installed: pip install {package}") from None
    return found[0] if found else None


# -- plain, and torch's own ------------------------------------------------------------------------------------------


def _plain(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    return Running()


def _save_on_cpu(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    import torch

    is_pinned = subject.device.type != "cpu"
    kind = {"device_type": subject.device.type} if is_pinned else {}
    subject.around_forward = lambda: torch.autograd.graph.save_on_cpu(pin_memory=is_pinned, **kind)
    return Running()


def _compile(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    import torch
    import torch._functorch.config

    assert setting is not None
    # A cache of its own: the time to compile is part of what is reported.
    cache = tempfile.TemporaryDirectory(prefix="inductor", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
    torch._functorch.config.activation_memory_budget = setting
    subject.forward = torch.compile(subject.model)
    started = time.perf_counter()
    subject.step()
    subject.synchronize()
    facts = {"compile_seconds": time.perf_counter() - started}
    return Running(allocates_outside=True, facts=lambda: facts, close=cache.cleanup)


def _sac_ilp(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    """torch's own solver: a MILP over modules, and one per module over its operators."""
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    assert budget_bytes is not None
    graph, stats = _sac_graph(subject)
    layers = {name for name, module in subject.model.named_modules() if module in set(subject.checkpointable())}
    units = [node["fqn"] for node in graph.nodes if node["fqn"].partition(".")[2] in layers]
    started = time.perf_counter()
    discarded, _, _ = sac_milp(graph, memory_budget=budget_bytes / 2**30, ac_units=units)
    solver_seconds = time.perf_counter() - started
    if not discarded:
        raise CannotRunError("its solver found no solution for this budget")
    named = dict(subject.model.named_modules())
    subject.model.activation_checkpointing_enable()
    for layer in subject.checkpointable():
        layer.gradient_checkpointing = False
    for name, share in discarded.items():
        layer = named[name.partition(".")[2]]
        decisions = get_optimal_checkpointing_policy_per_module(stats[name], max(1 - share, 0.0))
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _checkpoint_by(lambda found=decisions: _by_position(found))
    return Running(facts=lambda: {"num_layers": len(discarded), "solver_seconds": solver_seconds})


def _sac_graph(subject: Subject) -> tuple[Any, Any]:
    """What `sac_milp` wants to know: memory, run time and trade-offs of every module, from fake steps."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode(), RuntimeEstimator()("operator-level-cost-model"):
        # Its errors come out of one product as exceptions; out of a model some end the process.
        torch.ones(2, 2) @ torch.ones(2, 2)
    with FakeTensorMode():
        fake = subject.rebuild()
        model, batch = fake.model, fake.batch
        model.zero_grad()

        def step() -> None:
            model(**batch).loss.backward()

        trade_offs, run_times, memory = SACEstimator(), RuntimeEstimator(), MemTracker()
        with trade_offs("operator-level-cost-model"):
            model(**batch)
        with run_times("operator-level-cost-model"):
            step()
        model.zero_grad()
        memory.track_external(model)
        for _ in range(2):  # its first pass has no module statistics of a steady state
            memory.reset_mod_stats()
            with memory:
                step()
    device = torch.device(subject.device.type, 0) if subject.device.type != "cpu" else torch.device("cpu")
    graph = parse_module_info(aggregate_stats(model, memory, run_times, trade_offs, device))
    return graph, trade_offs.sac_mod_stats


def _by_position(decisions: list[int]) -> Any:
    """Contexts that keep the results of those operators that `decisions` (one per operator) names with 1."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    positions = {False: -1, True: -1}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        positions[ctx.is_recompute] += 1
        at = positions[ctx.is_recompute]
        keeps = at < len(decisions) and decisions[at] == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# -- transformers' checkpointing of layers -----------------------------------------------------------------------------


def _every_nth_layer(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    subject.model.activation_checkpointing_enable(every_n_layers=int(setting or 1))
    return Running()


def _offloaded_layers(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    subject.model.activation_checkpointing_enable(offload=True)
    return Running()


def _fewest_layers(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    """The fewest layers, from the first on, under checkpointing whose measured peak is within the budget."""
    from benchmarks.peaks import peak_bytes

    assert budget_bytes is not None
    subject.model.activation_checkpointing_enable()
    layers = subject.checkpointable()

    def fits(count: int) -> bool:
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index < count
        subject.step()
        return peak_bytes(subject, Running()) <= budget_bytes

    if not fits(len(layers)):
        raise CannotRunError("does not fit: with every layer under checkpointing it needs more")
    low, high = -1, len(layers)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    fits(high)
    return Running(facts=lambda: {"num_layers": high})


def _selective(subject: Subject, setting: float | None, budget_bytes: int | None, *, kept: str) -> Running:
    """Layers under checkpointing, with what costs most to compute kept: matrix products, or attention alone."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    operators = _operators(kept)
    contexts = functools.partial(create_selective_checkpoint_contexts, operators)
    subject.model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return Running()


def _operators(kept: str) -> list[Any]:
    import torch

    aten = torch.ops.aten
    attention = [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    if kept == "attention":
        return attention
    products = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default]
    grouped = getattr(aten, "_grouped_mm", None)
    return [*attention, *products, *([grouped.default] if grouped is not None else [])]


BLOCK_ROWS = 512
"""Of what is in blocks, or tiles: as many as the batch has that sets the budget of `largest` on a CPU."""


def _tiled_by_hand(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    """What people write for long sequences: every layer checkpointed, in it the MLP in tiles of rows with a checkpoint
    each, and head and loss in chunks. Not plain's bits: a weight's gradient is added up over tiles."""
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    decoder, head = (getattr(subject.model, name, None) for name in ("model", "lm_head"))
    layers = subject.checkpointable()
    if decoder is None or head is None or not all(hasattr(layer, "mlp") for layer in layers):
        raise CannotRunError("is written for models with model, lm_head and layers with an mlp, such as llama")

    def tiled(whole: Callable[[Any], Any], x: Any) -> Any:
        tiles = x.flatten(0, -2).split(BLOCK_ROWS)
        return torch.cat([checkpoint(whole, tile, use_reentrant=False) for tile in tiles]).view_as(x)

    def loss_of(rows: Any, words: Any) -> Any:
        return F.cross_entropy(head(rows).float(), words, reduction="sum")

    def forward(input_ids: Any, labels: Any) -> Any:
        hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, -2)
        words = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        chunks = zip(hidden.split(BLOCK_ROWS), words.split(BLOCK_ROWS), strict=True)
        losses = [checkpoint(loss_of, *chunk, use_reentrant=False) for chunk in chunks]
        return SimpleNamespace(loss=torch.stack(losses).sum() / (words != -100).sum())

    for layer in layers:
        layer.mlp.forward = functools.partial(tiled, layer.mlp.forward)
    subject.model.activation_checkpointing_enable()
    subject.forward = forward
    return Running()


def _checkpoint_by(contexts: Callable[[], Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


# -- offloading packages -----------------------------------------------------------------------------------------------


def _torchtune(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    from torchtune.training import OffloadActivations

    manager = OffloadActivations()
    subject.around = lambda: manager
    return Running(warm_up_steps=2)


def _trl(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    from trl.models.activation_offloading import OffloadActivations

    manager = OffloadActivations()
    manager.update_model_params(subject.model)
    subject.around = lambda: manager  # its backward must run inside
    return Running(warm_up_steps=2)


# -- lowtide -----------------------------------------------------------------------------------------------------------


def _lowtide(subject: Subject, setting: float | None, budget_bytes: int | None, **declared: Any) -> Running:
    import lowtide

    assert budget_bytes is not None
    memory: dict[str, Any] = {"min_bytes": subject.min_bytes, **declared}
    memory |= {} if subject.optimizer is None else {"optimizer": "auto"}
    how: Any = {"optimizer": subject.optimizer, "strict": True}
    tide = lowtide.optimize(subject.model, budget=budget_bytes, memory=memory, **how)

    def facts() -> dict[str, Any]:
        predicted = tide.plan.predicted if tide.plan is not None else None
        assert predicted is not None
        return {
            "budget_bytes": budget_bytes,
            "predicted_peak_bytes": predicted.peak_bytes,
            "predicted_ratio": (predicted.step_seconds + predicted.check_seconds) / predicted.plain_seconds,
            "gap": predicted.gap,
            "planning_seconds": sum(event.seconds for event in tide.events),
            "num_plans": len(tide.events),
            "loss": tide.plan.loss,
            "state_bytes_moved": 0 if tide.plan.optimizer is None else tide.plan.optimizer.moved_bytes,
        }

    def audit() -> Any:
        assert tide.tide is not None
        return tide.tide.audit()

    # Observe, compare, and correct.
    return _under(subject, tide, lambda: tide.stats, audit, facts)


def _lowtide_keep(subject: Subject, setting: float | None, budget_bytes: int | None) -> Running:
    import lowtide

    tide = lowtide.apply(subject.model, {})
    return _under(subject, tide, lambda: tide.stats, tide.audit, dict)


def _under(
    subject: Subject,
    tide: Any,
    stats: Callable[[], Any],
    audit: Callable[[], Any],
    facts: Any,
    *,
    warm_up_steps: int = 4,
) -> Running:
    def counters() -> dict[str, Any]:
        found = stats()
        return {
            "copied_bytes": found.copied_out_bytes + found.copied_in_bytes,
            "stall_seconds": found.stall_seconds,
            "swapped_bytes": found.swapped_bytes,
            "recomputed_bytes": found.recomputed_bytes,
            "disk_bytes": found.disk_bytes,
            "pinned_bytes": found.host_bytes if subject.device.type != "cpu" else 0,
        }

    return Running(
        counters=counters,
        reset=tide.reset_stats,
        audit=audit,
        facts=facts,
        warm_up_steps=warm_up_steps,
        close=tide.remove,
    )


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("plain", _plain, ("torch",)),
        Method("plain, a second process", _plain, ("torch",)),
        Method("layer checkpointing", _every_nth_layer, ("transformers",)),
        Method("every n-th layer", _every_nth_layer, ("transformers",)),
        Method("layer checkpointing, inputs offloaded", _offloaded_layers, ("transformers",)),
        Method("fewest layers that fit", _fewest_layers, ("transformers",), needs_budget=True, limit_factor=2),
        Method("selective: matmuls kept", functools.partial(_selective, kept="matmuls"), ("torch", "transformers")),
        Method("selective: attention kept", functools.partial(_selective, kept="attention"), ("torch", "transformers")),
        Method(
            TILED,
            _tiled_by_hand,
            ("torch", "transformers"),
            is_exact=False,
            note=f"layers checkpointed; MLP, head and loss in tiles of {BLOCK_ROWS} rows: near plain's gradients",
        ),
        Method("save_on_cpu", _save_on_cpu, ("torch",)),
        Method("torchtune offloading", _torchtune, ("torchtune", "torchao")),
        Method("trl offloading", _trl, ("trl",)),
        Method("torch.compile budget", _compile, ("torch",), is_exact=False, limit_factor=4),
        Method("torch sac_ilp", _sac_ilp, ("torch", "pulp"), needs_budget=True, limit_factor=4),
        Method("lowtide keep", _lowtide_keep, ("lowtide",)),
        Method("lowtide", _lowtide, ("lowtide",), needs_budget=True, limit_factor=2),
        Method(
            "lowtide, loss in blocks",
            functools.partial(_lowtide, loss={"rows": BLOCK_ROWS}),
            ("lowtide",),
            is_exact=False,
            needs_budget=True,
            limit_factor=2,
            note=f"head and loss in blocks of {BLOCK_ROWS} rows: the bits of that sum, not plain's",
        ),
        Method(
            "lowtide, layers in blocks",
            functools.partial(_lowtide, rows=BLOCK_ROWS),
            ("lowtide",),
            is_exact=False,
            needs_budget=True,
            limit_factor=2,
            note=f"layers, head and loss in blocks of {BLOCK_ROWS} rows, all but attention: the bits of that sum",
        ),
    )
}
