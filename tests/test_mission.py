"""The table of docs/mission.md: each feature of MindSpore Transformers' and MindSpeed's documents, what it is here, and
the test that shows it or the reason why it is otherwise.

The page is written from `ROWS` by `python tests/test_mission.py`; a test keeps the two equal, and another one looks for
every test that is named.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mission.md"
NUM_FEATURES = 72


@dataclass(frozen=True, slots=True)
class Row:
    """One feature."""

    there: str
    """As its documents name it."""
    state: Literal["works", "different", "in part", "missing"]
    here: str
    """What it is here; the reason, where it does not simply work."""
    shown_by: str = ""
    """`FILE::TEST` below tests/, without `.py`."""


RECOMPUTE = (
    Row("`recompute: true`", "works", "all layers run again", "mindformers/test_follow::test_the_same_bits"),
    Row("`recompute: [2, 1]`: counts of layers for each stage", "works", "the same layers",
        "mindformers/schema/test_cases::test_compat"),
    Row("`recompute`: tables `[chunk][stage]`", "works", "the same layers; lists of tuples too",
        "mindformers/schema/test_count_rule::test_counts_per_cell"),
    Row("`select_recompute: true`: the default list", "works", "products and activations of MLPs, by recipes",
        "mindformers/test_follow::test_default_lists_of_a_family"),
    Row("`select_recompute`: a list of names", "works", "one operator at a time, no layer runs again",
        "mindformers/test_plan::test_a_recomputed_op_has_its_recipe_and_its_retained_input"),
    Row("`select_recompute: {name: layers}`", "works", "layers for each name",
        "examples/train/test_mindformers::test_documented_example"),
    Row("`select_recompute_exclude`", "works", "out of a pattern, or out of a recomputed layer",
        "mindformers/test_follow::test_the_same_bits_whatever_is_mixed"),
    Row("`select_comm_recompute`", "works", "the collective is issued again in backward",
        "runtime/recompute/test_collectives::test_gathers_at_norms_are_made_again"),
    Row("`select_comm_recompute_exclude`", "works", "those are not issued again, and stay",
        "runtime/recompute/test_collectives::test_excluded_ones_are_kept"),
    Row("`parallel_optimizer_comm_recompute`", "works", "FSDP2's `reshard_after_forward` of recomputed layers",
        "mindformers/test_follow::test_flags_about_shards_say_where_they_have_no_effect"),
    Row("`mp_comm_recompute`", "works", "functional collectives, DTensor's, and torch's own without FSDP2: results are "
        "kept; with `compat` no effect, as in upstream's code",
        "runtime/recompute/test_collectives::test_results_of_collectives_are_kept"),
    Row("`recompute_slice_activation`", "works", "each tensor-parallel rank keeps its share of a layer's input",
        "mindformers/test_sliced_inputs::test_half_of_each_input_is_kept_with_the_same_bits"),
    Row("`offset`, `pipeline_stage`, `pp_interleave_num`", "works", "the same grid, also on one device",
        "mindformers/schema/test_cases::test_compat"),
    Row("`pipeline_scheduler: zero_bubble_v`", "works", "the second chunk comes back",
        "mindformers/schema/test_zero_bubble_v::test_layers_go_down_and_come_back"),
    Row("`start_stage`, `stage_num`", "works", "stages are numbered from there; a module has one range of stages",
        "cli/test_explain::test_stages_are_numbered_from_the_first_of_the_module"),
    Row("MTP layers (`mtp_depth`)", "works", "counted as upstream counts them",
        "mindformers/schema/test_file::test_a_file_of_upstream"),
    Row("the lines of its log (`Formative layer_recompute`, ...)", "works", "as its documents print them",
        "cli/test_explain::test_the_documented_grid_prints_the_documented_tables"),
    Row("names of MindSpore's modules", "works", "translated for Llama, Qwen, Mixtral, DeepSeek-V3",
        "mindformers/schema/test_upstream::test_agrees"),
    Row("version 2: `recompute: {mode, select_module, exclude_op}`", "works", "read unchanged",
        "mindformers/schema/test_newer::test_layers_and_parts"),
    Row("version 2: `recompute_comm`", "works", "as `select_comm_recompute`",
        "mindformers/schema/test_newer::test_shipped_blocks"),
)  # fmt: skip
SWAP = (
    Row("`swap: true`, nothing else", "works", "the output of the attention kernel, in every layer",
        "mindformers/test_follow::test_the_default_swap_moves_what_the_attention_kernel_gives"),
    Row("`default_prefetch`", "works", "operators ahead of the first reader",
        "mindformers/schema/test_cases::test_compat"),
    Row("`layer_swap`", "works", "what backward reads of the layers",
        "mindformers/test_follow::test_the_same_bits"),
    Row("`op_swap`", "works", "the outputs of the named operators, and nothing else",
        "mindformers/test_follow::test_the_output_of_an_op_is_what_goes"),
    Row("`backward_prefetch: N`", "different", "says when the fetch starts; memory goes as soon as the copy is done, "
        "and not 3 N operators later", "runtime/offload/test_scheduler::test_a_written_distance_counts_operators"),
    Row("several entries for one name", "works", "each layer has the distance that is written for it",
        "mindformers/schema/test_cases::test_compat"),
    Row("recompute wins over swap", "works", "upstream warns and tries both; here one plan says which",
        "mindformers/test_plan::test_recompute_wins_over_a_swapped_layer"),
    Row("what something recomputed reads is not swapped", "works", "it stays, and the table names the reader",
        "mindformers/test_plan::test_what_is_read_by_something_recomputed_stays"),
    Row("with swap on, numbers are layers", "works", "and a note says so",
        "mindformers/schema/test_count_rule::test_with_swap_numbers_are_indices"),
    Row("swap and recompute on a pipeline", "works", "for each stage's own layers",
        "mindformers/test_follow_stages::test_two_ranks_and_the_schedules_of_torch"),
    Row("`memory_optimize_level: O0`, lazy inline", "different", "settings of MindSpore's compiler: named in one line",
        "mindformers/schema/test_file::test_a_file_of_upstream"),
    Row("version 2: `swap: {enable, layer_swap, op_swap}`", "works", "distances count layers there",
        "mindformers/test_follow::test_a_prefetch_in_layers_starts_where_backward_reaches_that_layer"),
)  # fmt: skip
ADAPTIVE = (
    Row("`--adaptive-memory-optimization`", "works", "`lowtide.optimize(model, \"auto\")`: a plan for what there is",
        "runtime/autopilot/test_autopilot::test_budgets_are_kept_and_no_bit_changes"),
    Row("profiling of modules: memory and time", "works", "one observed step, every operator; no layer stands for all",
        "profiling/test_observe_step::test_sites_have_the_names_that_the_runtime_gives_them"),
    Row("adaptive lossless swap", "works", "a swap is free while the timeline hides it, backward included",
        "planner/test_swap_has_a_price::test_no_plan_is_slower_than_the_better_of_both"),
    Row("policy generation for each layer", "works", "all activations at once, by a linear program",
        "planner/test_solve::test_random_steps_are_as_fast_as_exhaustive_search"),
    Row("policy search: step by step until stable", "works", "stable within three planned steps, none out of memory",
        "runtime/autopilot/test_autopilot::test_it_is_stable_within_three_planned_steps"),
    Row("the policy is made anew when steps change", "works", "one plan for each shape of batch",
        "runtime/autopilot/test_autopilot::test_each_shape_has_its_plan_and_known_ones_are_not_observed_again"),
    Row("policies for pipelines, by chunks in flight", "works", "`fit_stages`: every moment of a rank's schedule",
        "pipeline/test_budget::test_a_budget_holds_from_the_first_step_on_and_changes_no_bit"),
    Row("policies of ranks agree", "works", "one plan, checked by its hash",
        "runtime/autopilot/test_autopilot::test_two_ranks_follow_one_plan_and_fail_together"),
    Row("policies on disk", "works", "`lowtide plan --out`, `Plan.from_json`, `lowtide.apply(model, plan)`",
        "runtime/session/test_old_plans::test_a_plan_of_0_1_0_is_carried_out"),
    Row("SwapManager: swap in time, so that no step ends out of memory", "works", "the guard spills "
        "before the limit, in steps that are longer than planned too, and the next step has a plan of its own",
        "test_longer_steps::test_the_budget_holds_in_every_step"),
    Row("out of memory is caught", "works", "`tide.step` takes the micro-batch back and runs it again",
        "runtime/session/test_retry_everywhere::test_out_of_memory_at_some_operators_changes_no_bit"),
    Row("out of memory on several ranks", "works", "`tide.step(closure, is_joint=True)`: all take the micro-batch "
        "back; FSDP2, DDP, sends and receives: the job ends with one message",
        "runtime/session/test_joint_steps::test_losses_are_those_without_the_error"),
    Row("`adapt_mem_func_wrapper`: `autograd.Function`s", "works", "without a wrapper: `save_for_backward` is planned, "
        "and what is kept on `ctx` goes where its layer runs again, resized outputs and graphs of its own, too",
        "runtime/recompute/test_functions::test_bytes_left_are_those_of_a_reentrant_checkpoint"),
    Row("`--adaptive-recompute-device-size`", "works", "a budget in bytes",
        "test_budgets::test_random_budgets_are_kept"),
    Row("`--swap-attention`, `--swap-modules`", "works", "`swap: [layers.*.self_attn]`",
        "runtime/test_bit_equality::test_random_plans_are_the_same_to_the_bit"),
    Row("`--recompute-num-layers` beside `--swap-attention`", "works", "`recompute: [layers.0-7.mlp]` beside it",
        "runtime/test_bit_equality::test_random_plans_are_the_same_to_the_bit"),
    Row("`--smart-swap`", "different", "a budget plans single activations; other shapes and MoE too",
        "runtime/autopilot/test_plan_cache::test_batches_of_random_lengths"),
    Row("`--swap-layer-input`", "works", "`recompute: all` beside `swap: all`, or a budget",
        "runtime/test_contract::test_contract_10_keyword_inputs_of_a_recomputed_layer_are_swapped"),
)  # fmt: skip
RERUN = (
    Row("`--recompute-granularity full --recompute-method block`", "works", "`recompute: [layers.0-7]`",
        "test_layers_again::test_bits_and_peaks_of_layers_that_run_again"),
    Row("`--recompute-method uniform`, chunks of several layers", "different", "each layer keeps its own input, and a "
        "plan may swap it: that takes less, and no chunk runs at once",
        "runtime/test_contract::test_contract_10_recomputed_layers_drop_what_they_save"),
    Row("`--recompute-granularity selective --recompute-modules`", "works", "`recompute: [layers.*.mlp]`",
        "runtime/test_contract::test_contract_10_recomputed_layers_drop_what_they_save"),
    Row("`--recompute-activation-function`", "works", "`recompute: [layers.*.mlp.act_fn]` drops its output too",
        "runtime/recompute/test_recipe_sources::"
        "test_what_is_made_again_is_not_held_between_forward_and_backward"),
    Row("`--recompute-norm`", "works", "`recompute: [layers.*.input_layernorm]`",
        "recipes/test_build::test_a_llama_layer_in_bf16"),
    Row("`--recompute-in-bubble`, `--recompute-in-advance`", "missing", "a layer runs again when backward reaches it; "
        "in V schedules the bubble that this would fill is small", ""),
    Row("`--moe-zero-memory`", "works", "what experts compute from received rows is recomputed, the rows are kept",
        "pipeline/test_turns::"
        "test_a_layer_that_runs_again_keeps_its_rows_and_another_one_that_exchanges_does_not_run_again"),
)  # fmt: skip
OPTIMIZER = (
    Row("`--swap-optimizer`", "works", "`optimizer: swap`: any optimizer that steps the same in parts",
        "optimizer/test_bit_equality::test_same_bits"),
    Row("`--swap-optimizer-times`", "different", "`bucket_bytes`: three buckets are on the device, without a wait "
        "between rounds", "optimizer/test_transfers::test_no_more_than_a_few_buckets_are_on_the_device"),
    Row("its checkpoints", "works", "torch's format, from plain to swapped and back",
        "optimizer/test_swap::test_checkpoints_go_from_plain_to_swapped_and_back"),
    Row("`--virtual-optimizer`", "in part", "tier `mapped`, which kernels read in place: CPU and CUDA; NPUs are "
        "refused by name, since torch_npu's call gives memory that the host cannot read",
        "optimizer/test_mapped::test_same_bits_in_training"),
    Row("`--virtual-optimizer all, 2 3 ...`: gigabytes for each stage", "in part", "`resident` says the share that "
        "stays; `memory.optimizer: auto` finds it for a budget",
        "planner/test_place_state::test_auto_is_never_slower_than_keep_and_never_needs_more"),
    Row("20 % less memory on DeepSeek-V3", "works", "predicted: 25 % less on 512 devices, the step 1 % longer",
        "cli/test_plan_cluster::test_a_swapped_optimizer_takes_a_fifth_and_more_off_deepseek_v3"),
)  # fmt: skip
PIPELINE = (
    Row("`--schedules-method dualpipev`", "works", "`pipeline: {schedule: dualpipev}`; cut, run and budgeted",
        "pipeline/test_execute::test_bits_are_those_of_one_process"),
    Row("`--dualpipev-dw-detach`", "works", "weight gradients put off: `WeightGradients`, also in cool-down",
        "pipeline/test_weight_gradients::test_linear_has_the_bits_of_torch"),
    Row("`--moe-fb-overlap` in pairs", "works", "`overlap: true`: any model whose experts exchange rows",
        "pipeline/test_overlap_pipeline::test_a_pipeline_with_overlap_has_the_bits_of_one_process"),
    Row("`--moe-fb-overlap` without a pipeline", "works", "`one_stage_overlap`",
        "pipeline/test_generators::test_one_stage_overlap_pairs_each_forward_with_the_backward_before"),
    Row("`--moe-fb-overlap` with interleaved stages", "works", "`interleaved_overlap`",
        "pipeline/test_generators::test_interleaved_overlap_is_interleaved_with_one_more_forward_first"),
    Row("warm-up and cool-down hide half of the exchanges", "works", "`split_experts(num_parts=2)`: half of the "
        "experts computes while rows of the other half travel; shared experts, and `most_kept` weight gradients, hide "
        "more",
        "pipeline/test_overlap_pipeline::"
        "test_parts_of_experts_and_shared_ones_hide_exchanges_with_the_bits_of_one_process"),
    Row("messages between stages are hidden", "in part", "torch's runtime sends beside compute; what is hidden is not "
        "counted", "pipeline/test_clock::test_what_a_transfer_costs"),
    Row("60 % and 85 % of communication hidden", "in part", "90 % and 92 % of the emulated all-to-all on two ranks, 8 "
        "and 16 micro-batches, with parts of experts, a shared expert and weight gradients put off; 85 % on four; no "
        "device",
        "benchmarks/test_overlap_figures::"
        "test_a_whole_step_reaches_the_ceiling_of_its_schedule"),
    Row("swap and recompute inside of pairs", "works", "any plan, the same bits",
        "pipeline/test_overlap::test_plans_do_not_change_a_bit"),
)  # fmt: skip
GROUPS = (
    ("Recompute (MindSpore Transformers)", RECOMPUTE),
    ("Fine-grained swap (MindSpore Transformers)", SWAP),
    ("Adaptive memory optimization (MindSpeed)", ADAPTIVE),
    ("Kinds of recompute (MindSpeed, Megatron-LM)", RERUN),
    ("The optimizer's state (MindSpeed)", OPTIMIZER),
    ("DualPipeV and overlap (MindSpeed)", PIPELINE),
)
ROWS = tuple(row for _, rows in GROUPS for row in rows)


def page() -> str:
    """The text of docs/mission.md."""
    counts = collections.Counter(row.state for row in ROWS)
    told = ", ".join(f"{counts[state]} {state}" for state in ("works", "different", "in part", "missing"))
    lines = [
        "# What became of each feature",
        "",
        f"The {len(ROWS)} features that the documents of MindSpore Transformers and MindSpeed describe: {told}.",
        "*Different*: it does the same in another way, for the reason that is given. Tests run on CPUs and on a",
        "stand-in device; nothing was measured on an accelerator yet. `python tests/test_mission.py` writes this page.",
        "What to write instead of a flag: [migration](migration.md).",
        "",
        "| there | | here | shown by, below `tests/` |",
        "|---|---|---|---|",
    ]
    for title, rows in GROUPS:
        lines.append(f"| **{title}** | | | |")
        lines += [f"| {row.there} | {row.state} | {row.here} | {_shown(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(row: Row) -> str:
    file, _, name = row.shown_by.partition("::")
    return f"`{file}.py::{name}`" if name else ""


def test_the_page_is_the_list() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/test_mission.py"


def test_no_feature_is_left_out_or_told_twice() -> None:
    assert len(ROWS) == NUM_FEATURES
    assert [name for name, number in collections.Counter(row.there for row in ROWS).items() if number > 1] == []
    assert all("|" not in row.there + row.here for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.there)
def test_a_row_has_its_test_or_its_reason(row: Row) -> None:
    """A row without a test is one of something that is missing."""
    file, _, name = row.shown_by.partition("::")
    assert len(row.here) > 10 and (bool(name) or row.state == "missing")
    assert not name or re.search(rf"^ *def {name}\(", (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"), re.M)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
