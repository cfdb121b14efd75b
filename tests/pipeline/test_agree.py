"""What ranks tell each other through the store of the job."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from lowtide.pipeline.agree import FailureNote
from lowtide.tensors.private import default_store


def test_a_note_is_read_and_written_while_another_thread_waits_in_the_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        note = FailureNote("note", 1)

        def wait() -> None:
            with contextlib.suppress(RuntimeError):  # it waited in vain
                default_store().wait(["note"], timedelta(seconds=20))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        assert note.read() is None
        assert note.settle("rank 0 failed") == "rank 0 failed"
        thread.join()
        assert time.monotonic() - began < 10
    finally:
        dist.destroy_process_group()
