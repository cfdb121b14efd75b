"""Small wrong changes to lowtide, each one that a real mistake could look like, and the tests that should notice it.

What: `MUTANTS` is a plain list. `where` names a function (`package.module:Class.method`, below `lowtide`), `edit` what
is done to it (edits.py); `tests` are the few fast tests that should fail then; `why` says what a user's run would get.
`equivalent` says why no test can notice.
Why: a suite that passes says nothing about what it would notice. A test that is made weaker, or a check that is moved
and no longer reached, shows here.

How to add one: think of the mistake, not of the line. `python -m tests.mutants --only NAME` runs it. The list is kept
short: one that any test notices teaches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutants.edits import Edit, always, drops, gives, last_step, never, puts, without


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong change."""

    name: str
    where: str
    edit: Edit
    tests: tuple[str, ...]
    """For pytest, below `tests/`."""
    why: str
    equivalent: str = ""

    @property
    def area(self) -> str:
        """The room, and the part of it."""
        parts = self.where.partition(":")[0].split(".")
        return "/".join(parts[:2] if parts[0] == "runtime" else parts[:1])

    @property
    def file(self) -> Path:
        """Below `lowtide/`."""
        return Path(*self.where.partition(":")[0].split(".")).with_suffix(".py")

    @property
    def function(self) -> str:
        return self.where.partition(":")[2]


_RETRY = ("runtime/session/test_retry_properties.py", "runtime/session/test_retry.py")
_TIDE = ("runtime/session/test_tide.py",)
_WRAP = ("runtime/session/test_threads.py",)
_TABLES = ("runtime/hooks/test_tables.py",)
_SCHEDULER = ("runtime/offload/test_ends.py", "runtime/offload/test_scheduler.py")
_STREAMS = ("engines/test_compute_streams.py", "engines/test_virtual.py")
_ACCELERATOR = ("engines/test_pieces.py", "engines/test_accelerator_order.py")
_OPTIMIZER = (
    "optimizer/test_odd_state.py",
    "optimizer/test_swap.py",
    "optimizer/test_step.py",
    "optimizer/test_what_goes_wrong.py",
    "optimizer/test_cuts.py",
    "optimizer/test_in_backward.py",
)
_LOSS = ("loss/test_dtypes.py", "loss/test_cross_entropy.py")
_VERIFY = (
    "pipeline/test_rows.py",
    "pipeline/test_verify.py",
    "pipeline/test_schedule.py",
    "pipeline/test_attach.py",
)
_TIMELINE = ("timeline", "planner/test_problem.py", "planner/test_solve.py")

HANDLES = [
    Mutant(
        "kept-version",
        "runtime.saved.handle:Kept.open",
        never("version_of"),
        ("runtime/test_contract.py::test_contract_05_modified_after_saving_raises_what_plain_autograd_raises",),
        "a kept tensor that was written to gives a wrong gradient where plain autograd raises",
    ),
    Mutant(
        "view-version",
        "tensors.view:View.check",
        never("version"),
        ("runtime/test_contract.py::test_contract_05_modified_after_saving_raises_what_plain_autograd_raises",),
        "a swapped tensor that was written to gives the old gradient where plain autograd raises",
    ),
    Mutant(
        "kept-not-detached",
        "runtime.saved.handle:Kept.__init__",
        puts("tensor.detach()", "tensor"),
        ("runtime/test_contract.py::test_contract_06_unusual_lives_of_a_graph",),
        "an output that its own operator saves owns its own graph: memory of every dropped step is never freed",
    ),
    Mutant(
        "casts-of-parameters-are-activations",
        "runtime.hooks.context:Parameters.has",
        without("leads_to_parameter"),
        ("runtime/hooks/test_classify.py::test_views_and_casts_of_parameters_are_the_models_own",),
        "under autocast, a layer that saves something else than before swaps the copies of its weights as activations",
    ),
    Mutant(
        "producer-not-compared",
        "runtime.hooks.forward_pass:ForwardPass.pack",
        without("producer"),
        ("runtime/test_contract.py::test_contract_07_what_was_made_otherwise_or_has_other_dimensions_is_counted",),
        "a tensor at the place of another one is kept as that one is, uncounted",
    ),
]

SWAP = [
    Mutant(
        "sent-before-it-is-filled",
        "runtime.offload.scheduler:Departures.keep_time",
        without("_pending_sequence"),
        ("runtime/offload/test_scheduler.py::test_what_is_saved_before_it_is_filled_is_sent_after",),
        "what an operator saves first and fills afterwards is copied out empty",
    ),
    Mutant(
        "copy-out-waits-for-nothing",
        "runtime.offload.scheduler:OffloadScheduler._copy_out",
        drops("wait"),
        ("engines/test_virtual.py::test_the_correct_runtime_is_right_and_never_blamed",),
        "an activation is copied out before the kernel that makes it has run",
    ),
    Mutant(
        "copy-in-does-not-wait-for-its-buffer",
        "runtime.offload.scheduler:OffloadScheduler._copy_in",
        drops("wait", "COMPUTE"),
        ("engines/test_virtual.py::test_the_correct_runtime_is_right_and_never_blamed",),
        "a fetch overwrites memory that a kernel still uses",
    ),
    Mutant(
        "reader-does-not-wait",
        "runtime.offload.scheduler:OffloadScheduler._wait_for",
        drops("wait"),
        ("engines/test_virtual.py::test_the_correct_runtime_is_right_and_never_blamed",),
        "backward reads a buffer that is not filled yet",
    ),
    Mutant(
        "failed-read-unnoticed",
        "runtime.offload.scheduler:OffloadScheduler._wait_for",
        never("failure"),
        ("runtime/session/test_tide.py::test_a_read_that_fails_is_an_error_with_the_tier",),
        "a disk that fails to read gives a wrong gradient",
    ),
    Mutant(
        "failed-write-unnoticed",
        "runtime.offload.scheduler:OffloadScheduler._finish",
        never("failure"),
        ("runtime/session/test_tide.py::test_nothing_is_lost_when_the_disk_is_full",),
        "an activation whose copy out failed is dropped all the same",
    ),
    Mutant(
        "site-of-another-version",
        "runtime.offload.scheduler:OffloadScheduler.find",
        without("version"),
        ("runtime/test_contract.py::test_contract_03_a_write_makes_a_new_site_while_the_old_one_lives",),
        "a tensor that is written and saved again comes back as it was before the write",
    ),
    Mutant(
        "site-of-another-part",
        "runtime.offload.scheduler:OffloadScheduler.find",
        without("part"),
        ("runtime/offload/test_scheduler.py::test_a_part_with_a_counter_of_its_own_is_no_site_of_another_part",),
        "parts of one storage with counters of their own are taken for one another",
    ),
    Mutant(
        "never-released",
        "runtime.offload.scheduler:OffloadScheduler.read",
        without("num_readers"),
        ("runtime/offload/test_scheduler.py::test_with_a_graph_that_stays_each_site_goes_with_its_last_reader",),
        "what is fetched stays on the device until backward is over: the peak is that of a plain step",
    ),
    Mutant(
        "slot-freed-while-it-is-read",
        "runtime.offload.scheduler:_events_of",
        puts("(copy.event, copy.reading)", "(copy.event,)"),
        ("engines/test_compute_streams.py::test_a_slot_stays_until_the_copies_from_it_are_complete",),
        "a slot is given to another activation while a fetch still reads it",
    ),
    Mutant(
        "source-dropped-while-leaving",
        "runtime.offload.scheduler:OffloadScheduler._take_over",
        always("is_leaving"),
        (*(file for file in _STREAMS), "runtime/test_contract.py::test_contract_06_unusual_lives_of_a_graph"),
        "memory of a graph that is dropped is used again while a copy still reads it",
    ),
    Mutant(
        "spilled-before-it-is-filled",
        "runtime.offload.spill:Guard._spill",
        never("sequence"),
        ("runtime/offload/test_spill.py::test_a_limit_of_nothing_spills_everything_and_changes_no_bit",),
        "what an operator saves first and fills afterwards is sent away empty",
    ),
    Mutant(
        "spilled-after-a-write",
        "runtime.offload.spill:Spillable.spill",
        never("version_of"),
        ("runtime/offload/test_spill.py::test_what_was_written_to_is_not_spilled",),
        "the guard sends away bytes that were written to since they were saved",
    ),
]

RECIPES = [
    Mutant(
        "operand-not-compared",
        "recipes.proof:_Comparison._given",
        never("key"),
        ("recipes/test_proof.py::test_operands_are_told_apart_by_storage_version_and_shape",),
        "a frozen weight or adapter chosen anew each step: the recipe uses the one of the first step",
    ),
    Mutant(
        "version-of-an-operand-not-compared",
        "recipes.proof:_Comparison._given",
        never("version"),
        ("recipes/test_proof.py::test_operands_are_told_apart_by_storage_version_and_shape",),
        "a recipe starts from a tensor as it is after a write, its site was made before it",
    ),
    Mutant(
        "another-result-of-the-same-operator",
        "recipes.proof:_Comparison._pair",
        puts("known is ran", "True"),
        ("recipes/test_proof.py::test_two_results_of_one_operator_are_told_apart",),
        "`y.sin() * y.cos()` and `y.sin() * z.cos()`: the recipe of one is taken for the other",
    ),
    Mutant(
        "autocast-inside-recipes",
        "recipes.execute:CompiledRecipe.run",
        puts("DisableAutocast()", "torch.enable_grad()"),
        ("recipes/test_execute.py::test_nothing_is_saved_and_nothing_is_cast",),
        "a backward under autocast makes recipes in bfloat16",
    ),
]

ENGINES = [
    Mutant(
        "chunk-used-too-early",
        "engines.staging:Staging.read_in",
        drops("settle"),
        ("engines/test_accelerator_order.py::test_disk_and_mixed_swaps_are_right",),
        "a pinned chunk is filled from the disk while the device still reads what was in it",
    ),
    Mutant(
        "copies-overtake-jobs",
        "engines.accelerator:AcceleratorEngine._copy",
        always("open_job"),
        ("engines/test_accelerator_order.py::test_disk_and_mixed_swaps_are_right",),
        "a lane is out of order: an event counts as complete while a copy before it is under way",
    ),
    Mutant(
        "one-stream-for-all",
        "engines.accelerator:AcceleratorEngine.record",
        puts("self._compute_streams", "[self._ops.current_stream()]"),
        ("engines/test_compute_streams.py::test_a_recording_of_the_compute_lane_is_one_of_every_stream",),
        "what a side stream computes is copied out before it is computed",
    ),
    Mutant(
        "side-streams-not-waited-for",
        "engines.accelerator:AcceleratorEngine._block_for",
        puts("mark.lane is Lane.OUT and len(self._compute_streams) > 1", "False"),
        ("engines/test_compute_streams.py::test_memory_goes_back_to_its_stream_only_after_the_copy",),
        "memory is used again by another stream while its copy out still reads it",
    ),
    Mutant(
        "barrier-ignored",
        "engines.host:HostEngine.wait",
        drops("submit"),
        ("engines/test_host.py::test_a_copy_in_waits_for_its_own_copy_out",),
        "a fetch reads a range of the disk that is not written yet",
    ),
    Mutant(
        "ranges-joined-wrongly",
        "core.ranges:RangeAllocator.free",
        drops("_remove", "before"),
        ("engines/tiers/test_disk.py::test_ranges_never_overlap_and_all_come_back",),
        "two activations share a range of the disk",
    ),
]

BUCKETS = [
    Mutant(
        "bucket-in-does-not-wait-for-compute",
        "optimizer.transfers:Transfers.fetch",
        drops("wait"),
        ("optimizer/test_bit_equality.py::test_same_bits",),
        "a bucket arrives in memory that the computation still uses",
    ),
    Mutant(
        "bucket-is-used-before-it-arrives",
        "optimizer.transfers:Transfers.arrive",
        drops("wait"),
        ("optimizer/test_bit_equality.py::test_same_bits",),
        "the optimizer steps with what was in the memory before",
    ),
    Mutant(
        "bucket-leaves-before-it-is-updated",
        "optimizer.transfers:Transfers.send",
        drops("wait", "COMPUTE"),
        ("optimizer/test_bit_equality.py::test_same_bits",),
        "the state of the step before is written back",
    ),
    Mutant(
        "late-momenta-in-parts",
        "optimizer.parts:Parts._steps_at_once",
        gives("False"),
        ("optimizer/test_bit_equality.py::test_same_bits",),
        "SGD in bfloat16 gives other bits in the step in which a gradient first comes",
    ),
    Mutant(
        "half-a-step-is-resumed",
        "optimizer.step:Stepper._step_one",
        puts("True", "False"),
        ("optimizer/test_step.py::test_a_failure_inside_a_part_cannot_be_resumed",),
        "parameters that were updated before a step failed are updated again",
    ),
]

RETRY = [
    Mutant(
        "graphs-in-cycles-stay",
        "runtime.session.retry:Rollback._let_go",
        drops("collect"),
        _RETRY,
        "a graph in a reference cycle stays alive while the micro-batch runs again: out of memory again",
    ),
    Mutant(
        "copies-of-the-failed-graph-go-on",
        "runtime.session.retry:Rollback._let_go",
        drops("settle"),
        _RETRY,
        "what the failed graph swapped still has its slots when the micro-batch runs again",
    ),
    Mutant(
        "parameters-that-the-closure-wrote",
        "runtime.session.retry:_Gradient.obstacle",
        never("parameter_version"),
        _RETRY,
        "a closure with the optimizer's step in it is run again: two steps",
    ),
    Mutant(
        "a-rank-runs-again-alone",
        "runtime.session.retry:_no_second_run",
        gives("None"),
        _RETRY,
        "a rank repeats its collectives while the others go on: a hang",
    ),
    Mutant(
        "limit-and-slices-lost-in-a-retry",
        "runtime.session.tide:Tide._tighten",
        puts("(before.guard, before.slices)", "(None, None)"),
        (*_RETRY, *_TIDE),
        "after a retry nothing holds the budget",
    ),
]

THREADS = [
    Mutant(
        "first-tables-without-a-lock",
        "runtime.session.wrap:PlannedForwards._enter",
        puts("self._writing", "contextlib.nullcontext()"),
        _WRAP,
        "two threads in their first forward pass write their tables into one another",
    ),
    Mutant(
        "one-forward-pass-for-all-threads",
        "runtime.session.wrap:PlannedForwards.__init__",
        puts("threading.local()", "type('Shared', (), {})()"),
        _WRAP,
        "what one thread saves is taken for a tensor of another one's forward pass",
    ),
    Mutant(
        "a-fork-uses-the-parents-threads",
        "engines.host:HostEngine._check_process",
        gives("None"),
        ("engines/test_host.py",),
        "a forked child waits for ever for threads that it does not have",
    ),
]

COPIES = [
    Mutant(
        "reader-on-another-stream-does-not-wait",
        "runtime.offload.scheduler:OffloadScheduler._read_apart",
        drops("_wait_for"),
        _STREAMS,
        "backward on a side stream reads a buffer that is not filled yet",
    ),
    Mutant(
        "reads-of-another-backward",
        "runtime.offload.scheduler:OffloadScheduler._enter_task",
        drops("num_reads"),
        (*_TABLES, *_SCHEDULER),
        "in a second backward each buffer is released after its first reader and fetched once for each other one",
    ),
    Mutant(
        "a-failed-copy-out-forgets-its-source",
        "runtime.offload.scheduler:OffloadScheduler.start_offload",
        drops("_arriving"),
        (*_SCHEDULER, *_STREAMS),
        "after an error in the middle of a copy its source may be freed while the device still reads it",
    ),
    Mutant(
        "spilled-for-one-reader",
        "runtime.offload.spill:Spillable.spill",
        puts("sum((handle.num_readers for handle in handles))", "1"),
        ("runtime/offload/test_spill.py::test_what_was_spilled_is_fetched_once_for_all_of_its_readers",),
        "what the guard spilled is fetched once for each of its readers",
    ),
    Mutant(
        "blocks-in-pieces",
        "engines.accelerator:_pair_up",
        puts("host.numel()", "min(host.numel(), 4096)"),
        _ACCELERATOR,
        "host blocks in several pieces are copied from the wrong places",
    ),
    Mutant(
        "blocks-of-equal-steps",
        "engines.accelerator:_pair_up",
        last_step("COPY_BYTES"),
        _ACCELERATOR,
        "the second piece of a host block is copied to where a whole chunk would have ended",
    ),
    Mutant(
        "a-ring-that-overtakes-itself",
        "engines.staging:Staging.write_out",
        never("under_way", "_stages"),
        _ACCELERATOR,
        "what is longer than the ring is written to the disk with its later chunks in the place of earlier ones",
    ),
    Mutant(
        "tail-of-a-disk-job-not-waited-for",
        "engines.accelerator:AcceleratorEngine._wait_on_copy_lane.wait_for_job",
        never("tail"),
        _ACCELERATOR,
        "a copy in starts while the last piece of the copy out is still on the link",
    ),
]

STATE = [
    Mutant(
        "shared-state-is-torn-apart",
        "optimizer.store:StateStore._alone",
        gives("found"),
        _OPTIMIZER,
        "two states that share memory are two from then on: wrong numbers",
    ),
    Mutant(
        "a-bucket-that-could-not-leave-is-forgotten",
        "optimizer.store:StateStore.adopt",
        drops("part_from"),
        ("optimizer/test_step.py::test_what_could_not_be_written_leaves_the_device_once_it_can",),
        "state whose write failed stays on the device for ever, and its buffer counts as one that a step uses",
    ),
    Mutant(
        "state-of-a-failed-write-shows-the-slot",
        "optimizer.store:StateStore._stay",
        drops("bind_device"),
        ("optimizer/test_step.py::test_a_bucket_that_cannot_be_written_stays_on_the_device",),
        "after a full disk optimizer.state shows the bytes of the step before",
    ),
    Mutant(
        "state-replaced-in-the-middle-of-a-step",
        "optimizer.swap:OptimizerSwap._run",
        never("begun"),
        _OPTIMIZER,
        "half a step uses the old state and half the new one",
    ),
    Mutant(
        "a-failed-part-shows-the-device",
        "optimizer.step:Stepper._stop",
        drops("bind_host"),
        ("optimizer/test_step.py::test_a_failure_inside_a_part_cannot_be_resumed",),
        "after a step that stopped, optimizer.state shows a bucket that was let go",
    ),
    Mutant(
        "state-of-another-dtype-is-rounded",
        "optimizer.step:Stepper._holds_all",
        never("local"),
        ("optimizer/test_odd_state.py::test_odd_state_is_stepped_as_it_is_alone_and_no_slot_is_lost",),
        "an optimizer that replaces its state by one of a wider dtype loses the bits between",
    ),
]

LOSS = [
    Mutant(
        "float64-under-autocast",
        "loss.cross_entropy:picked_of",
        puts("upcast and logits.dtype.itemsize < 4", "upcast"),
        _LOSS,
        "logits in float64 are rounded to float32 under autocast",
    ),
    Mutant(
        "several-gradients-at-once",
        "loss.cross_entropy:_made",
        always("vmap: "),
        _LOSS,
        "is_grads_batched ends in an error of torch's",
    ),
]

PROVEN = [
    Mutant(
        "weight-gradients-twice",
        "pipeline.verify:_check_chunks",
        puts("(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)", "(Kind.BACKWARD_WEIGHT,)"),
        _VERIFY,
        "a schedule with B and W of one chunk adds its weight gradients twice",
    ),
    Mutant(
        "inputs-of-recipes-go-too-early",
        "timeline.memory:Lifetimes.of",
        puts("tick + 1 if tick >= release[source] else release[source]", "release[source]"),
        _TIMELINE,
        "the plan counts the input of a recipe as gone while the recipe reads it: over the budget",
    ),
    Mutant(
        "a-stop-at-its-own-tick",
        "timeline.memory:StepArrays.last_stop",
        puts("'right'", "'left'"),
        _TIMELINE,
        "a copy that may end at a stop is planned for the stop before: predicted and real peak differ",
    ),
]

MUTANTS: tuple[Mutant, ...] = (
    *HANDLES,
    *SWAP,
    *RECIPES,
    *ENGINES,
    *BUCKETS,
    *RETRY,
    *THREADS,
    *COPIES,
    *STATE,
    *LOSS,
    *PROVEN,
)
