"""An output of a module that is dropped, and recomputed by running the module again."""

from __future__ import annotations

import torch

from lowtide.runtime.recompute.region import RegionRun, own_hooks
from lowtide.tensors.private import current_graph_task_id
from lowtide.tensors.random_state import RandomState, autocast_state
from lowtide.tensors.view import View


class Rerun:
    """A module's dropped output, recomputed from the module's inputs when backward reads it.

    Owns handles on the inputs (which may themselves be kept, swapped or recomputed), and the random and autocast state
    in which the module ran. The result is held from the first reader of a backward pass to the last.
    """

    __slots__ = ("autocast", "nbytes", "num_readers", "num_reads", "prints", "random", "region", "result", "task")

    def __init__(self, region: RegionRun, random: RandomState, output: torch.Tensor) -> None:
        self.region = region
        self.random = random
        self.autocast = autocast_state(output.device.type)
        self.nbytes = output.untyped_storage().nbytes()
        self.prints = [region.fingerprints.of(output)]
        self.num_readers = 0
        self.num_reads = 0
        self.task: int | None = None
        self.result: torch.UntypedStorage | None = None

    def add_reader(self) -> None:
        """One more saved tensor views this output."""
        if self.num_readers == 0:
            self.region.claim_inputs()
        self.num_readers += 1

    def read(self) -> torch.UntypedStorage:
        """The output's storage, bit for bit what the forward produced."""
        task = current_graph_task_id()
        if task != self.task:
            self.task, self.num_reads, self.result = task, 0, None
        storage = self.result if self.result is not None else self._run()
        self.num_reads += 1
        self.result = storage if self.num_reads < self.num_readers and task != -1 else None
        return storage

    def _run(self) -> torch.UntypedStorage:
        region = self.region
        # With gradients, as in the first run: without them other kernels may run. The graph is released at once. What
        # it saves must not reach the hooks of an outer region that is running again.
        with torch.enable_grad(), own_hooks(), self.random.restored(), self.autocast():
            output = region.make_whole(self.prints)
        assert output.untyped_storage().nbytes() == self.nbytes, "a module's second run made an output of another size"
        return output.untyped_storage()


class RerunView:
    """A saved tensor that views a dropped module output."""

    __slots__ = ("rerun", "view")

    def __init__(self, rerun: Rerun, tensor: torch.Tensor) -> None:
        self.rerun = rerun
        self.view = View(tensor)

    def open(self) -> torch.Tensor:
        """The tensor, recomputed. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        return self.view.over(self.rerun.read())
