"""Experts split over two ranks: the same bits as one process that has both ranks' batches, whatever the routing."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from lowtide.pipeline import Overlap, expert_block, split_experts
from lowtide.pipeline.exchange import start_on_group
from lowtide.pipeline.experts import _has_shared, find_experts
from tests.support import moe_models, two_ranks
from tests.support.zoo import same_bits

MEMORIES: dict[str, Any] = {
    "swap": {"swap": ["layers.*"]},
    "recompute": {"recompute": "all"},
    "recompute parts": {"recompute": ["layers.*.self_attn", "layers.*.mlp.experts"], "swap": ["layers.*"]},
    # Which fate is cheaper is for the clock to say: one way is open.
    "budget swap": {"budget": "380KiB", "recompute": "none"},
    "budget recompute": {"budget": "380KiB", "swap": "none"},
}


# -- what the ranks run ------------------------------------------------------------------------------------------------


def equals_one_process(
    rank: int, kind: str, implementation: str, batches: str = "alike", *, dtype: str = "float32", num_parts: int = 1
) -> dict[str, Any]:
    model = moe_models.make_model(kind, implementation).to(getattr(torch, dtype))
    if batches == "idle":  # experts 0, 2 and 3 of rank 0 have it all
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias[:4] = torch.tensor([100.0, 50.0, 100.0, 100.0])
    num_batches, lengths = (2 if batches == "accumulated" else 1), ((3, 14) if batches == "uneven" else (11, 11))
    given = [[moe_models.make_batch(r, step=s, length=lengths[r]) for s in range(num_batches)] for r in (0, 1)]
    losses, truth = moe_models.together(model, given)
    apart = copy.deepcopy(model)
    losses_apart = [moe_models.run_step(apart, batch) for batch in (*given[0], *given[1])]
    handle = split_experts(model, group=None, num_parts=num_parts)
    num_rows = _watch_rows(model)
    own = [moe_models.run_step(model, batch) for batch in given[rank]]
    handle.average_gradients()
    norm = torch.nn.utils.get_total_norm([gradient.double() for gradient in truth.values()])
    largest = max(float(gradient.abs().max()) for gradient in truth.values())
    error = max(float((g / 2 - truth[name]).abs().max()) for name, g in moe_models.gradients_of(apart).items())
    return {
        "losses": [same_bits(loss, other) for loss, other in zip(own, losses[rank], strict=True)],
        "differing": _differing(moe_models.gradients_of(model), _halved(truth, handle.parameter_names, rank)),
        "losses apart": max(abs(float(a - b)) for a, b in zip(losses_apart, (*losses[0], *losses[1]), strict=True)),
        "error apart": error / largest,
        "norm": float(handle.gradient_norm() / norm),
        "rows": num_rows,
    }


def equals_the_whole_model(rank: int, kind: str, implementation: str, dtype: str, num_parts: int) -> list[str]:
    """On a rank of its own. What differs from the model of transformers."""
    model = moe_models.make_model(kind, implementation)
    if dtype != "autocast":
        model.to(getattr(torch, dtype))
    whole, batch = copy.deepcopy(model), moe_models.make_batch(rank)
    handle = split_experts(model, group=_groups_of_one()[rank], num_parts=num_parts)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        losses = {"loss": moe_models.run_step(model, batch)}, {"loss": moe_models.run_step(whole, batch)}
    handle.average_gradients()
    found, truth = moe_models.gradients_of(model) | losses[0], moe_models.gradients_of(whole) | losses[1]
    return _differing(found, truth)


def equals_one_batch_after_the_other(rank: int) -> list[str]:
    """Each rank has all experts, and a replica on the other rank."""
    model = moe_models.make_model("deepseek_v3", "eager")
    whole = copy.deepcopy(model)
    for other in (0, 1):
        moe_models.run_step(whole, moe_models.make_batch(other))
    handle = split_experts(model, group=_groups_of_one()[rank])
    moe_models.run_step(model, moe_models.make_batch(rank))
    handle.average_gradients(ranks=dist.group.WORLD, replicas=dist.group.WORLD)
    return _differing(
        moe_models.gradients_of(model), {name: g / 2 for name, g in moe_models.gradients_of(whole).items()}
    )


def averages_what_one_rank_lacks(rank: int) -> tuple[bool, bool]:
    """Rank 1 has no gradient of the head; neither has one of the last norm."""
    model = moe_models.make_model("qwen3_moe", "eager")
    handle = split_experts(model, group=None)
    moe_models.run_step(model, moe_models.make_batch(0))  # the same on both
    head, norm = model.lm_head.weight, model.model.norm.weight
    half, norm.grad = head.grad / 2, None
    if rank == 1:
        head.grad = None
    handle.average_gradients()
    return same_bits(head.grad, half), norm.grad is None


def follows_the_page(rank: int) -> list[str]:
    """What the code of docs/pipelines.md leaves behind."""
    page = Path(__file__).parents[2] / "docs" / "pipelines.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if "split_experts" in block)
    model = moe_models.make_model("mixtral", "grouped_mm")
    tokens = moe_models.make_batch(rank)
    before = _copied(dict(model.named_parameters()))
    scope = {"model": model, "batches": [{"input_ids": tokens, "labels": tokens}]}
    exec(compile(code, str(page), "exec"), scope)
    scope["handle"].remove()
    return [name for name, parameter in model.named_parameters() if same_bits(parameter, before[name])]


def keeps_state(rank: int) -> dict[str, bool]:
    model = moe_models.make_model("deepseek_v3", "eager")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    before = _copied(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = split_experts(model, group=dist.new_group([0, 1]))
    found = {"keys": list(model.state_dict()) == list(before)}
    found["slices"] = not _differing(_copied(model.state_dict()), _halved(before, handle.parameter_names, rank))
    found["gathered"] = not _differing(handle.full_state_dict(), before)
    moe_models.run_step(model, moe_models.make_batch(rank))
    handle.average_gradients()
    own = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    optimizer.step()
    trained = _copied(handle.full_state_dict())
    handle.remove()
    handle.remove()
    found["moved"] = all(not torch.equal(before[name], trained[name]) for name in handle.parameter_names)
    found["forwards"] = not any("forward" in vars(module) for module in model.modules())
    found["put back"] = dict(model.named_modules()) == modules and not _differing(model.state_dict(), trained)
    found["same objects"] = all(parameter is parameters[name] for name, parameter in model.named_parameters())
    found["gradients"] = not _differing(_halved(moe_models.gradients_of(model), handle.parameter_names, rank), own)
    model.zero_grad()
    split_experts(model, group=None).remove()
    return found


def equals_without_lowtide(rank: int, kind: str, implementation: str, memory: str) -> dict[str, Any]:
    """The shared experts, and parts of the others, are nothing that a plan changes."""
    model = moe_models.make_model(kind, implementation)
    plain = copy.deepcopy(model)
    truth = _three_steps(plain, split_experts(plain, group=None), rank, None)
    handle = split_experts(model, group=dist.new_group([0, 1]), num_parts=2)
    use = lowtide.optimize if "budget" in MEMORIES[memory] else lowtide.apply
    with use(model, memory=MEMORIES[memory] | {"min_bytes": 0}) as tide:
        found = _three_steps(model, handle, rank, tide)
        stats, plan = tide.stats, tide.plan
    differing = [name for a, b in zip(found, truth, strict=True) for name in _differing(a, b)]
    swapped = stats.swapped_bytes > 0
    if memory == "budget recompute":  # rows differ from step to step: the guard may spill what the plan does not swap
        swapped = any(site.fate is Fate.SWAP for site in plan.sites)
    return {"differing": differing, "swapped": swapped, "recomputed": stats.recomputed_bytes > 0}


def hides_exchanges(rank: int) -> list[str]:
    """Of one block, forward and backward: what starts, what is waited for, and when the shared experts compute."""
    model = moe_models.make_model("deepseek_v3", "eager")
    split_experts(model, group=_groups_of_one()[rank], num_parts=2)
    block = model.model.layers[1].mlp
    seen: list[str] = []
    block.shared_experts = nn.Sequential(block.shared_experts)  # what is there when the block runs counts
    block.shared_experts.register_forward_pre_hook(lambda *_: seen.append("shared"))
    block.shared_experts[0].gate_proj.register_full_backward_pre_hook(lambda *_: seen.append("shared"))

    class Work:
        def __init__(self, work: Any) -> None:
            self.wait = lambda: (seen.append("wait"), work.wait())

    def start(rows: Tensor, sent: Tensor, route: Any) -> Any:
        work = start_on_group(rows, sent, route)
        if not sent.is_floating_point():
            return work
        seen.append("start")
        return Work(work)

    overlap, made = Overlap(start=start), []
    x = torch.randn(2, 5, 32, requires_grad=True)
    overlap.run_pair(lambda: made.append(block(x)), None)
    overlap.run_pair(None, lambda: made[0].sum().backward())
    return seen


def refuses(rank: int) -> list[str]:
    indivisible = moe_models.make_model("qwen3_moe", "eager", num_experts=7)
    twice = moe_models.make_model("qwen3_moe", "eager")
    handle = split_experts(twice, group=None)
    planned, trained = (moe_models.make_model("qwen3_moe", "eager") for _ in range(2))
    tide = lowtide.apply(planned, {"swap": ["layers.*"]})
    moe_models.run_step(trained, moe_models.make_batch(0))
    not_ours = _groups_of_one()[1 - rank]
    texts = []
    for num_parts in (3, 1 + 2 * rank):  # the second one is a mistake on one rank, and all are told
        with pytest.raises(ConfigError) as error:
            split_experts(trained, group=None, num_parts=num_parts)
        texts.append(str(error.value))
    for model, group in ((indivisible, None), (twice, None), (planned, None), (trained, None), (trained, not_ours)):
        with pytest.raises(ConfigError) as error:
            split_experts(model, group=group)
        texts.append(str(error.value))
    tide.remove()
    with pytest.raises(ConfigError) as error:
        handle.average_gradients(replicas=dist.group.WORLD)
    texts.append(str(error.value))
    handle.remove()
    with pytest.raises(ConfigError) as error:
        handle.average_gradients()
    return [*texts, str(error.value)]


@functools.cache
def _groups_of_one() -> list[Any]:
    return [dist.new_group([0]), dist.new_group([1])]


def _three_steps(model: nn.Module, handle: Any, rank: int, tide: Any) -> list[dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        run = functools.partial(moe_models.run_step, model, moe_models.make_batch(rank, step=step))
        loss = run() if tide is None else tide.step(run)
        handle.average_gradients()
        found.append(moe_models.gradients_of(model) | {"loss": loss})
        optimizer.step()
        optimizer.zero_grad()
    return found


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _halved(whole: dict[str, Tensor], experts: tuple[str, ...], rank: int) -> dict[str, Tensor]:
    """Of experts the half of this rank."""
    return {name: tensor.chunk(2)[rank] if name in experts else tensor for name, tensor in whole.items()}


def _differing(found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same to the bit."""
    alike = {name for name in found.keys() & truth.keys() if same_bits(found[name], truth[name])}
    return sorted((found.keys() | truth.keys()) - alike)


def _watch_rows(model: nn.Module) -> list[list[int]]:
    """Will have how many rows each expert of this rank computed, by block."""
    seen: list[list[int]] = []

    def watch(block: Any) -> None:
        run = block._run

        def watched(rows: Tensor, num_rows: Tensor, *weights: Any) -> Tensor:
            seen.append(num_rows.tolist())
            return run(rows, num_rows, *weights)

        block._run = watched

    for module in model.modules():
        if isinstance(module, expert_block.SplitExperts):
            watch(module)
    return seen


JOBS: dict[str, two_ranks.Job] = {
    **{
        f"{kind} {implementation}": ("equals_one_process", {"kind": kind, "implementation": implementation})
        for kind in moe_models.KINDS
        for implementation in ("eager", "grouped_mm")
    },
    **{
        f"{kind} {implementation} {batches}": (
            "equals_one_process",
            {"kind": kind, "implementation": implementation, "batches": batches},
        )
        for kind, implementation, batches in (
            ("mixtral", "eager", "uneven"),
            ("deepseek_v3", "eager", "idle"),
            ("deepseek_v3", "grouped_mm", "idle"),
        )
    },
    **{
        f"{kind} {implementation} {batches} in {num_parts} parts": (
            "equals_one_process",
            {"kind": kind, "implementation": implementation, "batches": batches, "num_parts": num_parts},
        )
        for kind, implementation, batches, num_parts in (
            ("deepseek_v3", "eager", "accumulated", 2),
            ("deepseek_v3", "grouped_mm", "idle", 4),
            ("mixtral", "eager", "uneven", 4),
            ("qwen3_moe", "grouped_mm", "accumulated", 2),
        )
    },
    "bfloat16": (
        "equals_one_process",
        {"kind": "deepseek_v3", "implementation": "grouped_mm", "batches": "accumulated", "dtype": "bfloat16"},
    ),
    **{
        f"alone {kind} {implementation} {dtype}": (
            "equals_the_whole_model",
            {"kind": kind, "implementation": implementation, "dtype": dtype, "num_parts": num_parts},
        )
        for number, kind in enumerate(moe_models.KINDS)
        for other, (dtype, num_parts) in enumerate((("float32", 1), ("bfloat16", 4), ("autocast", 2)))
        for implementation in (("eager", "grouped_mm")[(number + other) % 2],)  # each with each kind and each type
    },
    "replicas": ("equals_one_batch_after_the_other", {}),
    "absent": ("averages_what_one_rank_lacks", {}),
    "page": ("follows_the_page", {}),
    "state": ("keeps_state", {}),
    **{
        f"{memory} {kind}": (
            "equals_without_lowtide",
            {"kind": kind, "implementation": implementation, "memory": memory},
        )
        for memory in MEMORIES
        if not memory.startswith("budget")
        for kind, implementation in (("qwen3_moe", "eager"), ("deepseek_v3", "grouped_mm"))
        if kind == ("qwen3_moe" if memory == "swap" else "deepseek_v3") or memory == "recompute"
    },
    "hidden": ("hides_exchanges", {}),
    "refused": ("refuses", {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    given = two_ranks.run(__name__, list(JOBS.values()), tmp_path_factory.mktemp("ranks"), seconds=300)
    return dict(zip(JOBS, given, strict=True))


def _jobs(function: str) -> list[str]:
    return [name for name, (called, _) in JOBS.items() if called == function]


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", _jobs("equals_one_process"))
def test_two_ranks_equal_one_process_with_the_rows_of_both(name: str, answers: dict[str, tuple[Any, Any]]) -> None:
    for answer in answers[name]:
        assert answer["differing"] == []
        assert all(answer["losses"])
        assert answer["norm"] == pytest.approx(1, rel=1e-2 if name == "bfloat16" else 1e-6)
        if name != "bfloat16":  # as two micro-batches, one after the other, in the model of transformers
            assert answer["losses apart"] < 1e-5
            assert answer["error apart"] < 1e-5


@pytest.mark.slow
def test_the_batches_are_what_they_are_meant_to_be(answers: dict[str, tuple[Any, Any]]) -> None:
    first, second = answers["deepseek_v3 eager idle"]
    assert [[num > 0 for num in block] for block in first["rows"]] == [[True, False, True, True]] * 2
    assert second["rows"] == [[0, 0, 0, 0]] * 2
    first, second = answers["mixtral eager uneven"]
    assert [sum(a + b) for a, b in zip(first["rows"], second["rows"], strict=True)] == [2 * (3 + 14) * 3] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", _jobs("equals_the_whole_model"))
def test_one_rank_is_the_model_of_transformers(name: str, answers: dict[str, tuple[Any, Any]]) -> None:
    assert answers[name] == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", _jobs("equals_without_lowtide"))
def test_a_plan_changes_no_bit(name: str, answers: dict[str, tuple[Any, Any]]) -> None:
    """Also where the exchange itself is in a region that runs again."""
    assert_same_bits(name, answers[name])


@pytest.mark.extended
@pytest.mark.parametrize("memory", [memory for memory in MEMORIES if memory.startswith("budget")])
def test_a_budget_changes_no_bit(memory: str, tmp_path: Path) -> None:
    """Which of these fates it takes is all that it adds to the rules above. Shared experts within a budget:
    test_budget.py."""
    how = {"kind": "deepseek_v3", "implementation": "grouped_mm", "memory": memory}
    (answer,) = two_ranks.run(__name__, [("equals_without_lowtide", how)], tmp_path)
    assert_same_bits(memory, answer)


def assert_same_bits(name: str, given: tuple[Any, ...]) -> None:
    for answer in given:
        assert answer["differing"] == []
        assert answer["swapped"] == name.startswith(("swap", "budget swap", "recompute parts"))
        assert answer["recomputed"] == ("recompute" in name)


@pytest.mark.slow
def test_ranks_with_the_same_experts_add_their_gradients_up(answers: dict[str, tuple[Any, Any]]) -> None:
    assert answers["replicas"] == ([], [])


@pytest.mark.slow
def test_a_gradient_that_one_rank_lacks_counts_as_zeros_and_one_that_all_lack_stays_absent(
    answers: dict[str, tuple[Any, Any]],
) -> None:
    assert answers["absent"] == ((True, True), (True, True))


@pytest.mark.slow
def test_the_code_of_the_documentation_trains_every_parameter(answers: dict[str, tuple[Any, Any]]) -> None:
    assert answers["page"] == ([], [])


# -- state, and what the exchange is asked -----------------------------------------------------------------------------


@pytest.mark.slow
def test_state_is_the_whole_models_and_comes_back(answers: dict[str, tuple[Any, Any]]) -> None:
    for answer in answers["state"]:
        assert [what for what, holds in answer.items() if not holds] == []


@pytest.mark.slow
def test_shared_experts_and_other_parts_run_while_rows_travel(answers: dict[str, tuple[Any, Any]]) -> None:
    forward = ["start", "start", "shared", "wait", "start", "wait", "start", "wait", "wait"]
    backward = ["start", "start", "wait", "start", "wait", "start", "shared", "wait", "wait"]
    assert answers["hidden"] == (forward + backward,) * 2


def test_shared_experts_of_a_block_with_other_code_stay_where_they_are() -> None:
    block: Any = moe_models.make_model("deepseek_v3", "eager").model.layers[-1].mlp
    assert _has_shared(block)
    kind = type(block)

    class Less(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:  # the same names in the same order
            whole = x
            shape = x.shape
            _, weights, index = self.gate(x)
            x = x.view(-1, x.shape[-1])
            x = self.experts(x, index, weights).view(*shape)
            return x - self.shared_experts(whole)

    block.__class__ = Less
    assert not _has_shared(block)
    block.__class__ = kind
    block.forward = block.forward
    assert not _has_shared(block)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_split_on_these_ranks(answers: dict[str, tuple[Any, Any]]) -> None:
    texts, others = answers["refused"]
    assert texts == others
    assert [text.removeprefix("lowtide.pipeline.split_experts: ") for text in texts] == [
        "'model.layers.0.mlp.experts' has 8 experts, which do not divide by 2 ranks with num_parts=3; choose a group "
        "of as many ranks as divide them",
        "ranks have different num_parts: rank 0 has 1, rank 1 has 3",
        "'model.layers.0.mlp.experts' has 7 experts, which do not divide by 2 ranks; choose a group of as many ranks "
        "as divide them",
        "'model.layers.0.mlp.experts' is split already; call remove() on the handle of that split",
        "the model is under a lowtide plan already; split first, then apply the plan",
        "'model.layers.0.mlp.experts.gate_up_proj' has a gradient; split the experts before the first backward, or "
        "after zero_grad()",
        "this rank is not in the group; pass the one that it is in",
        "average_gradients: 2 ranks, of which 2 share the experts and 2 have the same ones; 2 times 2 is 4",
        "average_gradients: remove() was called on this handle; split the experts again",
    ]


def test_ranks_are_needed() -> None:
    with pytest.raises(ConfigError) as error:
        split_experts(moe_models.make_model("qwen3_moe", "eager"), group=None)
    assert str(error.value) == (
        "lowtide.pipeline.split_experts: there is no process group; start the ranks with torchrun and call "
        "torch.distributed.init_process_group first"
    )


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return transformers.LlamaForCausalLM(config)


def _gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=4, head_dim=8,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            _llama,
            "LlamaForCausalLM has no experts; only the experts of transformers' Qwen3MoeExperts, DeepseekV3Experts, "
            "MixtralExperts can be split",
        ),
        (
            _gpt_oss,
            "'model.layers.0.mlp.experts' is of class GptOssExperts; only the experts of transformers' "
            "Qwen3MoeExperts, DeepseekV3Experts, MixtralExperts can be split",
        ),
        (
            lambda: moe_models.make_model("qwen3_moe", "batched_mm"),
            "'model.layers.0.mlp.experts' runs by 'batched_mm'; choose one that can be split: "
            'model.set_experts_implementation("grouped_mm") or "eager"',
        ),
    ],
)
def test_models_that_cannot_be_split(make: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_experts(make())
    assert str(error.value) == f"lowtide.pipeline.split_experts: {text}"
