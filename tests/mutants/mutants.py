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
_CONTRACT = ("runtime/test_contract.py",)
_TABLES = ("runtime/hooks/test_tables.py",)
_SCHEDULER = ("runtime/offload/test_ends.py", "runtime/offload/test_scheduler.py")
_SPILL = ("runtime/offload/test_ends.py", "runtime/offload/test_spill.py")
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
_LOSS = ("loss/test_dtypes.py", "loss/test_cross_entropy.py", "loss/test_parallel.py")
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
        never("version_of"),
        ("runtime/test_contract.py::test_contract_05_modified_after_saving_raises_what_plain_autograd_raises",),
        "a swapped tensor that was written to gives the old gradient where plain autograd raises",
    ),
    Mutant(
        "kept-not-detached",
        "runtime.saved.handle:Kept.__init__",
        puts("tensor.detach()", "tensor"),
        ("runtime/test_leaks.py::test_a_graph_that_outlives_its_tide_still_works_and_then_frees_everything",),
        "an output that its own operator saves owns its own graph: memory of every dropped step is never freed",
    ),
    Mutant(
        "zerotensors-are-movable",
        "tensors.kinds:is_plain",
        without("is_zero_tensor"),
        ("runtime/test_forward_mode.py",),
        "forward-mode differentiation under swap ends in a segmentation fault",
    ),
    Mutant(
        "conjugates-are-movable",
        "runtime.hooks.classify:Saved.__init__",
        puts("(tensor.is_conj() or tensor.is_neg())", "False"),
        ("runtime/test_contract.py::test_contract_03_views_are_rebuilt_with_size_stride_and_offset",),
        "a saved conjugate view comes back without its conjugate bit: a wrong gradient of complex numbers",
    ),
    Mutant(
        "casts-of-parameters-are-activations",
        "runtime.hooks.classify:Parameters.has",
        without("leads_to_parameter"),
        ("runtime/test_contract.py::test_contract_04_autocast_copies_of_parameters_are_not_counted_as_recomputed",),
        "under autocast the copies of all weights are swapped as if they were activations",
    ),
    Mutant(
        "producer-not-compared",
        "runtime.hooks.forward_pass:ForwardPass._pack",
        without("is_same_producer"),
        ("runtime/test_contract.py::test_contract_07_what_was_made_otherwise_or_has_other_dimensions_is_counted",),
        "a tensor at the place of another one gets that one's fate, uncounted",
    ),
]

SWAP = [
    Mutant(
        "sent-before-it-is-filled",
        "runtime.offload.departures:Departures.keep_time",
        without("_pending_sequence"),
        ("runtime/offload/test_scheduler.py::test_what_is_saved_before_it_is_filled_is_sent_after",),
        "what an operator saves first and fills afterwards is copied out empty",
    ),
    Mutant(
        "window-of-fetches",
        "runtime.offload.prefetch:Prefetch._may_fetch",
        puts("self._ahead_bytes + following.copy.nbytes <= self._window.nbytes()", "True"),
        ("runtime/offload/test_scheduler.py::test_fetches_ahead_of_need_stay_within_the_window",),
        "all that was swapped comes back at the start of backward: nothing is saved",
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
        "no-next-tier",
        "runtime.offload.scheduler:OffloadScheduler._allocate",
        puts("tiers[start:]", "tiers[start : start + 1]"),
        ("runtime/offload/test_scheduler.py::test_where_one_tier_is_full_the_next_one_is_taken",),
        "a full host keeps activations on the device although the disk has room",
    ),
    Mutant(
        "slot-of-a-cancelled-copy",
        "runtime.offload.scheduler:OffloadScheduler._forward",
        drops("free"),
        ("runtime/offload/test_scheduler.py::test_a_copy_that_was_cancelled_gives_its_slot_back",),
        "each copy that backward overtakes leaks its place on the disk, until the disk is full",
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
        "runtime.offload.spill:Group.spill",
        without("version_of"),
        ("runtime/offload/test_spill.py::test_what_was_written_to_is_not_spilled",),
        "the guard sends away bytes that were written to since they were saved",
    ),
    Mutant(
        "gradients-come-unseen",
        "runtime.offload.spill:Guard.begin",
        drops("_state_bytes"),
        ("runtime/offload/test_spill.py::test_gradients_that_came_are_counted_in_the_next_forward",),
        "in the second step the guard does not know of the gradients: the budget is passed",
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
        "signs-of-zero",
        "recipes.proof:is_same_constant",
        without("repr"),
        ("recipes/test_proof.py::test_constants",),
        "0.0 and -0.0 are taken for one number, and 1 / x has another sign",
    ),
    Mutant(
        "freed-addresses",
        "recipes.proof:OperatorLog._makers_of",
        drops("_pins"),
        ("recipes/test_proof.py::test_freed_addresses_are_not_taken_for_one_another",),
        "a storage that has the address of a freed one is taken for it",
    ),
    Mutant(
        "autocast-inside-recipes",
        "recipes.execute:Program.run",
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
        "chunk-written-before-it-arrived",
        "engines.staging:Staging._write_oldest",
        drops("settle"),
        ("engines/test_accelerator_order.py::test_disk_and_mixed_swaps_are_right",),
        "the disk gets what was in a pinned chunk before",
    ),
    Mutant(
        "started-jobs-cancelled",
        "engines.staging:LaneWorker.cancel",
        never("is_started"),
        ("engines/test_accelerator_order.py::test_cancel_drops_what_has_not_started_and_only_that",),
        "a slot is given away while the disk is still writing it",
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
        "unsettled-is-complete",
        "engines.accelerator:Mark.is_complete",
        never("settled"),
        ("engines/test_accelerator_order.py::test_an_event_behind_a_disk_write_covers_it_and_what_follows",),
        "a write to the disk that has not begun counts as complete, and its source is dropped",
    ),
    Mutant(
        "close-while-copies-run",
        "engines.accelerator:AcceleratorEngine.close",
        drops("synchronize"),
        ("engines/test_accelerator_order.py::test_closing_waits_for_copies_that_are_under_way",),
        "pinned memory goes back to the system while the device still writes to it",
    ),
    Mutant(
        "barrier-ignored",
        "engines.host:_Lane.next_copy",
        never("complete"),
        ("engines/test_host.py::test_a_copy_in_waits_for_its_own_copy_out",),
        "a fetch reads a range of the disk that is not written yet",
    ),
    Mutant(
        "finished-out-of-order",
        "engines.host:_Lane.finish",
        puts("self.finished_upto + 1 in self._finished_ahead", "self._finished_ahead"),
        ("engines/test_host.py::test_a_lane_has_come_as_far_as_its_first_copy_that_is_not_over",),
        "with two threads a lane's event is complete before the copies before it",
    ),
    Mutant(
        "ranges-joined-wrongly",
        "engines.tiers.disk:RangeAllocator.free",
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
        ("optimizer/test_bit_equality.py::test_same_bits[SGD-foreach]",),
        "SGD in bfloat16 gives other bits in the step in which a gradient first comes",
    ),
    Mutant(
        "half-a-step-is-resumed",
        "optimizer.step:Stepper._step_one",
        puts("True", "False"),
        ("optimizer/test_step.py::test_a_failure_inside_a_part_cannot_be_resumed",),
        "parameters that were updated before a step failed are updated again",
    ),
    Mutant(
        "half-a-step-is-saved",
        "optimizer.swap:OptimizerSwap._refuse",
        drops("refuse_torn"),
        ("optimizer/test_step.py::test_a_failed_fetch_at_every_bucket_is_resumed_to_the_same_bits",),
        "a checkpoint has some parameters of this step and some of the one before",
    ),
    Mutant(
        "stretches-of-one-place",
        "optimizer.buckets:StateBucket.cut",
        puts("entry.start_bytes + start * size", "entry.start_bytes"),
        ("optimizer/test_cuts.py::test_same_bits[torch.float32-AdamW-foreach]",),
        "the state of each stretch is written over that of the first one",
    ),
    Mutant(
        "prefetched-bucket-is-believed",
        "optimizer.in_backward:BackwardPrefetch.take",
        without("_versions"),
        ("optimizer/test_overlap.py::test_a_write_to_a_tensor_that_was_kept_since_before_the_fetch_counts",),
        "state that was written to after its bucket was fetched is overwritten",
    ),
]

RETRY = [
    Mutant(
        "a-chain-of-errors-keeps-its-frames",
        "runtime.session.retry:Rollback._let_go",
        puts("_chain(failure)", "(failure,)"),
        _RETRY,
        "the error that the last one was raised from holds the failed graph: the retry runs out of memory again",
    ),
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
        drops("_settle"),
        _RETRY,
        "what the failed graph swapped still has its slots when the micro-batch runs again",
    ),
    Mutant(
        "accumulations-of-all-attempts",
        "runtime.session.retry:_Gradient.go_back",
        drops("num_seen"),
        _RETRY,
        "with two failures the second share of a gradient is added twice, or not at all",
    ),
    Mutant(
        "gradients-stay-aside",
        "runtime.session.retry:_Gradient.close",
        never("num_seen", "num_held"),
        _RETRY,
        "after the last attempt failed, parameters have no gradient where they had one",
    ),
    Mutant(
        "the-share-that-is-new-is-lost",
        "runtime.session.retry:_Gradient._after",
        puts("self.num_seen < self.num_held", "self.num_seen <= self.num_held"),
        _RETRY,
        "of a weight used twice the second attempt loses what came after the failure",
    ),
    Mutant(
        "gradients-that-the-closure-wrote",
        "runtime.session.retry:_Gradient.obstacle",
        never("num_written"),
        _RETRY,
        "a closure that clips or scales gradients is run again: clipped twice",
    ),
    Mutant(
        "parameters-that-the-closure-wrote",
        "runtime.session.retry:_Gradient.obstacle",
        never("parameter_version"),
        _RETRY,
        "a closure with the optimizer's step in it is run again: two steps",
    ),
    Mutant(
        "graphs-of-gradients",
        "runtime.session.retry:_Gradient.obstacle",
        never("_is_kept_graph"),
        _RETRY,
        "gradients of gradients, which replace what was there, are taken back to what they were not",
    ),
    Mutant(
        "totals-of-failed-attempts",
        "runtime.session.retry:_Start.go_back",
        drops("setattr"),
        _RETRY,
        "stats count what a failed attempt kept and swapped",
    ),
    Mutant(
        "fewer-gradients-than-before",
        "runtime.session.retry:_Start.check_repeated",
        gives("None"),
        _RETRY,
        "a closure that does less when it runs again leaves gradients of two halves, without a word",
    ),
    Mutant(
        "parameters-outside-the-model",
        "runtime.session.retry:_Start.__init__",
        drops("param_groups"),
        _RETRY,
        "a loss with weights of its own: their gradients are counted twice after a retry",
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
        puts("(guard, slices)", "(None, None)"),
        (*_RETRY, *_TIDE),
        "after a retry nothing holds the budget",
    ),
    Mutant(
        "peak-of-another-plan",
        "runtime.session.tide:Tide._tighten",
        drops("audited_peak_bytes"),
        (*_RETRY, *_TIDE),
        "after a retry the plan shows the audited peak of the one that ran out of memory",
    ),
    Mutant(
        "a-full-host-has-room",
        "runtime.session.tide:Tide._tighten",
        puts("self._counters.num_kept_for_lack_of_room", "0"),
        (*_RETRY, *_TIDE),
        "where the host is full the retry swaps more, which stays on the device: an attempt is wasted",
    ),
    Mutant(
        "one-failed-recipe-gives-up-all",
        "runtime.session.tide:Tide._give_up_recipes",
        never("num_tried"),
        (*_RETRY, *_TIDE, "runtime/recompute/test_recipe_sources.py"),
        "one recipe that does not hold makes the step keep everything that recipes made: over the budget",
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
        "layers-that-diverge-are-never-learned-again",
        "runtime.hooks.forward_pass:ForwardPass._compare",
        drops("entry", "clear"),
        _TABLES,
        "after a change of shape or mode the names of the new sites are those of the old ones",
    ),
    Mutant(
        "fewer-saved-tensors-go-unsaid",
        "runtime.hooks.forward_pass:ForwardPass._compare",
        never("position"),
        _TABLES,
        "a layer that saves less than its table is not counted as a divergence, and never learned again",
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
        "room-is-made-of-what-still-arrives",
        "runtime.offload.scheduler:OffloadScheduler._make_room",
        drops("_block_until"),
        (*_SCHEDULER, *_STREAMS),
        "memory of a fetch that was given up is used again while its copy still fills it",
    ),
    Mutant(
        "a-failed-copy-out-forgets-its-source",
        "runtime.offload.scheduler:OffloadScheduler.start_offload",
        drops("_arriving"),
        (*_SCHEDULER, *_STREAMS),
        "after an error in the middle of a copy its source may be freed while the device still reads it",
    ),
    Mutant(
        "sources-of-a-dead-scheduler",
        "runtime.offload.scheduler:_leave_the_rest",
        drops("leaving"),
        (*_SCHEDULER, *_STREAMS),
        "a graph that dies with its scheduler frees sources that copies still read",
    ),
    Mutant(
        "fetches-for-another-stream",
        "runtime.offload.prefetch:Prefetch._start",
        never("compute_stream"),
        (*_SCHEDULER, *_STREAMS),
        "a buffer comes from the pool of a stream that does not read it, and is used again too early",
    ),
    Mutant(
        "fetched-ahead-with-old-reads",
        "runtime.offload.prefetch:Prefetch._start",
        drops("num_reads"),
        (*_TABLES, *_SCHEDULER),
        "with retain_graph the second backward releases what it fetched ahead after the first reader",
    ),
    Mutant(
        "spilled-part-of-another-part",
        "runtime.offload.spill:Group.is_of",
        without("part_of"),
        _SPILL,
        "parts of one storage with counters of their own share one spilled copy",
    ),
    Mutant(
        "spilled-for-one-reader",
        "runtime.offload.spill:Group.spill",
        puts("len(handles)", "1"),
        _SPILL,
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
        "a-ring-of-unequal-chunks",
        "engines.accelerator:AcceleratorEngine._make_staging",
        puts("[chunk for chunk in chunks if chunk.numel() == STAGE_BYTES]", "chunks"),
        _ACCELERATOR,
        "a write to the disk overruns the pinned chunk that is smaller than the first one",
    ),
    Mutant(
        "tail-of-a-disk-job-not-waited-for",
        "engines.accelerator:AcceleratorEngine._wait_on_copy_lane.wait_for_job",
        never("tail"),
        _ACCELERATOR,
        "a copy in starts while the last piece of the copy out is still on the link",
    ),
    Mutant(
        "more-stages-under-way-than-there-are",
        "engines.staging:Staging.write_out",
        never("under_way", "_stages"),
        _ACCELERATOR,
        "of a large tensor the chunks that wait for the disk are overwritten by later ones",
    ),
    Mutant(
        "parts-of-a-slot-begin-at-its-start",
        "engines.accelerator:AcceleratorEngine.part_of",
        puts("slot.place + start_bytes", "slot.place"),
        (*_ACCELERATOR, "optimizer/test_cuts.py"),
        "on a device each stretch of a large parameter's state is written to the same place of the disk",
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
        "state-that-shares-with-a-gradient",
        "optimizer.store:StateStore._alone",
        puts("(p.detach(), p.grad)", "(p.detach(),)"),
        _OPTIMIZER,
        "a state that is the gradient itself keeps the gradient of its first step",
    ),
    Mutant(
        "a-bucket-that-could-not-leave-is-forgotten",
        "optimizer.store:StateStore.adopt",
        drops("part_from"),
        _OPTIMIZER,
        "state whose write failed stays in a bucket that the device is said not to hold",
    ),
    Mutant(
        "a-slot-without-its-bucket",
        "optimizer.store:StateStore._make_bucket",
        drops("free"),
        _OPTIMIZER,
        "each step in which the device is full leaks a bucket of host memory",
    ),
    Mutant(
        "slots-of-before-the-checkpoint",
        "optimizer.store:StateStore.start_anew",
        drops("free"),
        _OPTIMIZER,
        "each load_state_dict leaks the host memory of all state",
    ),
    Mutant(
        "state-of-a-failed-write-shows-the-slot",
        "optimizer.store:StateStore._stay",
        drops("bind_device"),
        _OPTIMIZER,
        "after a full disk optimizer.state shows the bytes of the step before",
    ),
    Mutant(
        "the-users-own-mapping",
        "optimizer.state:ShownState.take_over",
        always("isinstance"),
        _OPTIMIZER,
        "after detach() the mapping that the user put in place is gone",
    ),
    Mutant(
        "a-mapping-without-its-factory",
        "optimizer.state:ShownState._show",
        puts("getattr(content, 'default_factory', None)", "None"),
        _OPTIMIZER,
        "after optimizer.state was replaced a new parameter's first step is a KeyError",
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
        _OPTIMIZER,
        "after a step that stopped, optimizer.state shows a bucket that was let go",
    ),
    Mutant(
        "state-of-another-dtype-is-rounded",
        "optimizer.step:Stepper._holds_all",
        never("local"),
        _OPTIMIZER,
        "an optimizer that replaces its state by one of a wider dtype loses the bits between",
    ),
    Mutant(
        "state-that-comes-later-stays",
        "optimizer.step:Stepper._holds_all",
        puts("(parameter, key) not in known", "False"),
        _OPTIMIZER,
        "a key that an optimizer adds in a later step is never moved, and the device fills",
    ),
    Mutant(
        "hooks-of-a-resumed-step",
        "optimizer.swap:OptimizerSwap.resume",
        drops("hook", "optimizer"),
        _OPTIMIZER,
        "after resume() post-step hooks have not run: schedules and averages are a step behind",
    ),
    Mutant(
        "gathered-before-it-was-sent",
        "optimizer.transfers:Transfers.gather",
        puts("(engine.record(Lane.COMPUTE), engine.record(Lane.OUT))", "(engine.record(Lane.COMPUTE),)"),
        _OPTIMIZER,
        "after a failed write the state on the device is that of the step before",
    ),
]

LOSS = [
    Mutant(
        "float64-under-autocast",
        "loss.cross_entropy:sliced_cross_entropy",
        puts("upcast and logits.dtype.itemsize < 4", "upcast"),
        _LOSS,
        "logits in float64 are rounded to float32 under autocast",
    ),
    Mutant(
        "float64-over-ranks",
        "loss.parallel:parallel_cross_entropy",
        puts("upcast and logits.dtype.itemsize < 4", "upcast"),
        _LOSS,
        "the same over a vocabulary on several ranks",
    ),
    Mutant(
        "layout-of-a-z-loss",
        "loss.cross_entropy:_gradient",
        puts("given.log_sum is None", "True"),
        _LOSS,
        "the gradient has another layout than plain's, and what sums over it other bits",
    ),
    Mutant(
        "several-gradients-at-once",
        "loss.cross_entropy:_made",
        always("vmap: "),
        _LOSS,
        "is_grads_batched ends in an error of torch's",
    ),
    Mutant(
        "parts-that-make-no-vocabulary",
        "loss.parallel:_all_reduce_most",
        never("first", "end", "said"),
        _LOSS,
        "ranks that give wrong first words get a loss over words counted twice",
    ),
]

PROVEN = [
    Mutant(
        "idle-ranks-end-the-proof",
        "pipeline.verify:_check_progress",
        puts("num_in_vain <= len(waiting)", "num_in_vain < len(waiting)"),
        _VERIFY,
        "a good schedule is refused",
    ),
    Mutant(
        "weight-gradients-twice",
        "pipeline.verify:_check_chunks",
        puts("(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)", "(Kind.BACKWARD_WEIGHT,)"),
        _VERIFY,
        "a schedule with B and W of one chunk adds its weight gradients twice",
    ),
    Mutant(
        "one-fault-of-order-is-the-first",
        "pipeline.verify:order_faults",
        never("carried_by"),
        _VERIFY,
        "two messages of equal shape are swapped without an error",
    ),
    Mutant(
        "inputs-of-recipes-go-too-early",
        "timeline.memory:Lifetimes.of",
        puts("max(release[source], tick + 1)", "release[source]"),
        _TIMELINE,
        "the plan counts the input of a recipe as gone while the recipe reads it: over the budget",
    ),
    Mutant(
        "work-of-storing-smaller-is-free",
        "timeline.memory:floor_curve",
        drops("work_bytes"),
        _TIMELINE,
        "the plan leaves out what storing smaller takes for a moment: over the budget",
    ),
    Mutant(
        "a-stop-at-its-own-tick",
        "timeline.memory:_stops",
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
