"""Collectives made again in backward, on two ranks: the same bits, the bytes that go, and how often each is issued."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parallel_llama
import pytest
import torch
import torch.distributed as dist
from parallel_llama import BATCH, TOKENS, WIDTH
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.catalog.wrappers import is_desugared
from lowtide.errors import ConfigError
from lowtide.runtime.written import follow, sections_in

NUM_LAYERS = 3
GATHERED = TOKENS * BATCH * WIDTH * 4
SHARE = GATHERED // parallel_llama.NUM_RANKS
GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"
# Backward of a gather scatters, and the other way round.
PLAIN = {GATHERS: 4 * NUM_LAYERS, SCATTERS: 4 * NUM_LAYERS}


class Ranks:
    """Two processes that wait for work. Each task is a function of this file's: `name(rank) -> answer`."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._answers = context.Queue()
        self._tasks = [context.Queue() for _ in range(2)]
        self._processes = [
            context.Process(target=_serve, args=(rank, str(folder), self._tasks[rank], self._answers), daemon=True)
            for rank in range(2)
        ]
        for process in self._processes:
            process.start()

    def run(self, task: Callable, *args: Any) -> list[Any]:
        """The answers of both ranks."""
        for queue in self._tasks:
            queue.put((task.__name__, args))
        answers: dict[int, Any] = {}
        while len(answers) < 2:
            rank, answer, error = self._answers.get(timeout=90)
            assert not error, f"rank {rank}: {error}"
            answers[rank] = answer
        return [answers[0], answers[1]]

    def close(self) -> None:
        for queue, process in zip(self._tasks, self._processes, strict=True):
            queue.put(None)
            process.join(10)
            process.kill()


def _serve(rank: int, folder: str, tasks: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=45)
    )
    while (task := tasks.get()) is not None:
        name, args = task
        try:
            answers.put((rank, globals()[name](rank, *args), ""))
        except BaseException:
            answers.put((rank, None, traceback.format_exc()))
            raise
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


class Collectives(TorchDispatchMode):
    """Counts what is issued."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_desugared(types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and "wait" not in name and "wrap" not in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def train(rank: int, config: dict | None, how: dict) -> dict[str, Any]:
    """Three steps, and whether each had the bits of a plain one."""
    plain = parallel_llama.build(rank, **how)
    truth = [parallel_llama.step(plain, seed) for seed in range(3)]
    model = parallel_llama.build(rank, **how)
    lines: list[str] = []
    counts, is_same = [], []
    with follow(model, sections_in(config), engine="virtual:7", say=lines.append) as tide:
        for seed, (loss, gradients) in enumerate(truth):
            with Collectives() as seen:
                got_loss, got = parallel_llama.step(model, seed)
            counts.append(dict(seen.counts))
            is_same.append(torch.equal(got_loss, loss))
            is_same += [torch.equal(a, b) for a, b in zip(got, gradients, strict=True)]
        stats = tide.stats
        return {
            "is_same": all(is_same),
            "counts": counts[1:],
            "kept": stats.kept_bytes / 3,
            "saved": stats.saved_bytes / 3,
            "recomputed": stats.recomputed_bytes / 3,
            "swapped": stats.swapped_bytes / 3,
            "anchors": stats.anchor_bytes / 3,
            "divergences": stats.num_divergences,
            "rows": [(row.layer, row.part, row.fate, row.nbytes) for row in tide.written.rows],
            "why": [row.why for row in tide.written.rows],
            "lines": lines,
            "again": [site.name for site in tide.plan.sites if site.recipe and site.recipe.collectives],
            "fates": {site.name: site.fate.value for site in tide.plan.sites},
        }


def recompute(**keys: Any) -> dict[str, Any]:
    return {"recompute_config": keys}


BOTH_NORMS = ("input_layernorm", "post_attention_layernorm")


@pytest.mark.parametrize(
    "how", [{}, {"sequence_dim": 1}, {"kind": "function"}], ids=["autograd", "batch first", "function"]
)
def test_gathers_at_norms_are_made_again(ranks: Ranks, how: dict) -> None:
    for found in ranks.run(train, recompute(select_comm_recompute=True), how):
        assert found["is_same"]
        assert found["divergences"] == 0
        assert found["rows"] == [
            (layer, part, "recompute", GATHERED) for layer in range(NUM_LAYERS) for part in BOTH_NORMS
        ]
        assert set(found["why"]) == {"recompute_config.select_comm_recompute (its all-gather is made again)"}
        # What goes is what was gathered; the norms' shares, which autograd does not save, are held for it.
        assert found["recomputed"] == 2 * NUM_LAYERS * GATHERED
        assert found["anchors"] == 2 * NUM_LAYERS * SHARE
        assert found["kept"] == found["saved"] - 2 * NUM_LAYERS * (GATHERED - SHARE)
        assert found["counts"] == [PLAIN | {GATHERS: 6 * NUM_LAYERS}] * 2


def test_some_layers_and_some_ops(ranks: Ranks) -> None:
    config = recompute(
        select_comm_recompute={r"attention_norm\.norm": [2], r"ffn_norm\.norm": [1]},
    )
    for found in ranks.run(train, config, {}):
        assert found["is_same"]
        assert found["rows"] == [
            (0, "input_layernorm", "recompute", GATHERED),
            (0, "post_attention_layernorm", "recompute", GATHERED),
            (1, "input_layernorm", "recompute", GATHERED),
        ]
        assert found["counts"] == [PLAIN | {GATHERS: PLAIN[GATHERS] + 3}] * 2


def test_excluded_ones_are_kept(ranks: Ranks) -> None:
    config = recompute(select_comm_recompute=[r".*\.norm"], select_comm_recompute_exclude={r"ffn_norm\.norm": True})
    for found in ranks.run(train, config, {}):
        assert found["is_same"]
        assert [row[:3] for row in found["rows"]] == [
            (layer, BOTH_NORMS[0], "recompute") for layer in range(NUM_LAYERS)
        ]
        assert found["counts"] == [PLAIN | {GATHERS: 5 * NUM_LAYERS}] * 2


def test_beside_recomputed_layers(ranks: Ranks) -> None:
    """A whole layer runs again with its collectives, as under plain checkpointing."""
    for found in ranks.run(train, recompute(recompute=[1], select_comm_recompute=True), {}):
        assert found["is_same"]
        assert [row[:2] for row in found["rows"]] == [
            (0, "<layer>"),
            *[(layer, part) for layer in (1, 2) for part in BOTH_NORMS],
        ]
        again = {GATHERS: 2 + 2 * (NUM_LAYERS - 1), SCATTERS: 1}  # checkpoint stops after what is saved last
        assert found["counts"] == [{key: PLAIN[key] + again[key] for key in PLAIN}] * 2


def test_beside_recomputed_ops_and_swaps(ranks: Ranks) -> None:
    config = {
        "recompute_config": {
            "select_comm_recompute": {r"attention_norm\.norm": [0, 1, 2], r"ffn_norm\.norm": [1]},
            "select_recompute": {r"attention_norm\.norm": [0], r"feed_forward\.mul": [1]},
        },
        "swap_config": {
            "swap": True,
            "layer_swap": [{"backward_prefetch": 3, "layers": [0, 2]}],
            "op_swap": [{"op_name": "attention", "backward_prefetch": 5, "layers": [1]}],
        },
        "compat": True,
    }
    for found in ranks.run(train, config, {}):
        assert found["is_same"]
        assert found["divergences"] == 0
        assert found["again"] == [
            "layers.0.self_attn.all_gather_into_tensor",
            "layers.1.self_attn.all_gather_into_tensor",
            "layers.1.mlp.all_gather_into_tensor",
            "layers.2.self_attn.all_gather_into_tensor",
        ]
        assert found["fates"]["layers.2.mlp.all_gather_into_tensor"] == "swap"
        assert found["fates"]["layers.0.input_layernorm.mul_1"] == "recompute"
        assert found["swapped"] > 4 * GATHERED
        assert found["counts"] == [PLAIN | {GATHERS: PLAIN[GATHERS] + 4}] * 2


def test_scatters_that_nothing_reads_and_collectives_that_cannot_be_repeated(ranks: Ranks) -> None:
    config = recompute(select_comm_recompute=[r"attention\.wo", r"attention_norm\.norm"])
    for found in ranks.run(train, config, {"kind": "in place"}):
        assert found["is_same"]
        assert found["rows"] == []
        none = "backward reads no result of a functional collective there"
        which = "collective c10d._allgather_base_, which is not a functional one"
        for part in ("self_attn.o_proj", "input_layernorm"):
            line = f"note: no effect: select_comm_recompute at '{part}' in layers 0-2: {none} ({which})"
            assert line in found["lines"]


def train_where_one_rank_fails(rank: int) -> dict[str, Any]:
    """The recipe of one gather gives other bytes on one rank alone."""
    plain = parallel_llama.build(rank)
    truth = [parallel_llama.step(plain, seed) for seed in range(3)]
    model = parallel_llama.build(rank)
    with follow(model, sections_in(recompute(select_comm_recompute=True)), engine="virtual:7") as tide:
        make = tide._make_plan

        def make_and_break(profile: Any, budget_bytes: int) -> Any:
            plan = make(profile, budget_bytes)
            if rank == 0:
                return plan
            return plan.with_sites(
                _broken(site) if site.name == "layers.1.mlp.all_gather_into_tensor" else site for site in plan.sites
            )

        tide._make_plan = make_and_break
        is_same = []
        for seed, (loss, gradients) in enumerate(truth):
            with Collectives() as seen:
                got_loss, got = parallel_llama.step(model, seed)
            is_same.append(torch.equal(got_loss, loss))
            is_same += [torch.equal(a, b) for a, b in zip(got, gradients, strict=True)]
        return {"is_same": all(is_same), "counts": dict(seen.counts), "divergences": tide.stats.num_divergences}


def _broken(site: Any) -> Any:
    """The same node made by a recipe that has the right size and the wrong bytes."""
    import dataclasses

    from lowtide.catalog.site import RecipeStep

    recipe = site.recipe
    last = {"step": len(recipe.steps) - 1, "output": 0}
    steps = (*recipe.steps, RecipeStep(op="aten.neg.default", args=(last,)))
    return dataclasses.replace(site, recipe=dataclasses.replace(recipe, steps=steps))


def test_a_recipe_that_fails_on_one_rank_is_given_up_on_all(ranks: Ranks) -> None:
    """Else one rank would issue a collective that the other does not."""
    for found in ranks.run(train_where_one_rank_fails):
        assert found["is_same"]
        assert found["counts"] == PLAIN | {GATHERS: 6 * NUM_LAYERS - 1}
        assert found["divergences"] == 3


def observe_again_on_one_rank(rank: int) -> dict[str, Any]:
    """One rank alone saves something else for a step, and so learns its tables anew."""
    model = parallel_llama.build(rank)
    plain = parallel_llama.build(rank)
    truth = [parallel_llama.step(plain, seed) for seed in range(5)]
    with follow(model, sections_in(recompute(select_comm_recompute=True)), engine="virtual:7") as tide:
        is_same = []
        for seed, (loss, gradients) in enumerate(truth):
            hook = model.norm.register_forward_pre_hook(_square) if rank == 0 and seed == 2 else None
            with Collectives() as seen:
                got_loss, got = parallel_llama.step(model, seed)
            if hook is not None:
                hook.remove()
            is_same.append(torch.equal(got_loss, loss))
            is_same += [torch.equal(a, b) for a, b in zip(got, gradients, strict=True)]
        return {"is_same": all(is_same), "counts": dict(seen.counts), "divergences": tide.stats.num_divergences}


def _square(module: torch.nn.Module, args: tuple) -> None:
    (args[0] * args[0]).sum()


def test_a_rank_that_observes_alone_issues_nothing_of_its_own(ranks: Ranks) -> None:
    first, second = ranks.run(observe_again_on_one_rank)
    assert first["is_same"] and second["is_same"]
    assert first["divergences"] > 0
    assert second["divergences"] == 0
    assert first["counts"] == second["counts"] == PLAIN | {GATHERS: 6 * NUM_LAYERS}


def take_over_a_plan(rank: int) -> str:
    from lowtide.catalog.observe import observe
    from lowtide.config.mindformers import resolve
    from lowtide.planner.collectives import with_own_groups
    from lowtide.planner.sections import plan_sections

    model = parallel_llama.build(rank, num_layers=1)
    tokens = torch.zeros(TOKENS, BATCH, dtype=torch.long)
    profile = observe(model, lambda: model(tokens))
    config = recompute(select_comm_recompute=[r"input_layernorm"])["recompute_config"]
    written = plan_sections(profile, resolve(config, num_layers=1))
    text = written.plan.to_json().replace('"0"', '"group of another rank"')
    plan = with_own_groups(type(written.plan).from_json(text), profile)
    assert plan == written.plan
    assert profile == type(profile).from_json(profile.to_json())
    bare = profile.from_json(profile.to_json().replace("collective_recipe", "recipe_of_collectives", 0))
    import dataclasses

    bare = dataclasses.replace(
        profile, nodes=tuple(dataclasses.replace(node, collective_recipe=None) for node in profile.nodes)
    )
    try:
        with_own_groups(plan, bare)
    except ConfigError as error:
        return str(error)
    return ""


def test_names_of_groups_are_a_ranks_own(ranks: Ranks) -> None:
    message = (
        "recompute_config.select_comm_recompute: the first rank has a collective at "
        "'layers.0.self_attn.all_gather_into_tensor' that this rank has not; ranks that share a plan must run the same "
        "layers"
    )
    assert ranks.run(take_over_a_plan) == [message, message]


def write_into_what_was_gathered(rank: int) -> list[str]:
    """In-place writes to the wrapper of a collective's result raise as in plain autograd."""
    from torch.distributed import _functional_collectives as functional

    from lowtide.runtime.stats import Counters, Ledger  # noqa: F401

    errors = []
    for config in (None, recompute(select_comm_recompute=True)):
        model = parallel_llama.build(rank, num_layers=2)
        gather = model.ways.gather
        tide = follow(model, sections_in(config), engine="virtual:7") if config else None
        if tide:
            parallel_llama.step(model, 0)
        made: list[torch.Tensor] = []
        model.ways.gather = lambda x, made=made, gather=gather: made.append(gather(x)) or made[-1]
        tokens = torch.zeros(TOKENS, BATCH, dtype=torch.long)
        loss = model(tokens)
        assert type(made[0]) is functional.AsyncCollectiveTensor
        with torch.no_grad():
            made[1].mul_(2)
        try:
            loss.backward()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error).split(":")[0])
        if tide:
            tide.remove()
        dist.barrier()
    return errors


def test_in_place_writes_to_what_was_gathered_are_noticed(ranks: Ranks) -> None:
    for plain, ours in ranks.run(write_into_what_was_gathered):
        assert plain == "one of the variables needed for gradient computation has been modified by an inplace operation"
        assert ours == plain
