"""What every test gets: one seed, few threads, and a clear reason when a GPU test is skipped."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.support.processes import GARBAGE_THRESHOLDS

gc.set_threshold(*GARBAGE_THRESHOLDS)
# Tests run in parallel on small machines: a thread pool per worker would only fight the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing in the tests may depend on a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import hypothesis
except ImportError:  # `make gpu` installs nothing, and GPU machines often have no more than torch and pytest
    pass
else:
    hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("default")

_PLAIN_DIRECTORIES = ("config", "core", "planner", "cli")

# A process that has the stand-in device has it for good, so it is one of its own (tests/standin/test_standin.py).
_HAS_STANDIN = bool(os.environ.get("LOWTIDE_STANDIN"))
if _HAS_STANDIN:
    from tests.standin import device as standin

    standin.load()


if threading.current_thread() is threading.main_thread():
    # A shell that starts the suite in the background has Ctrl-C ignored, and every child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, files without a GPU test are not even imported: they may need what a GPU machine lacks. Tests of
    the stand-in device are there only where it is."""
    if not _HAS_STANDIN and collection_path.name == "on_device":
        return True
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py" or not collection_path.is_file():
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.accelerator.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Links are measured once for all tests of a process, and nothing is written to the user's cache."""
    # Matplotlib would look for fonts anew.
    os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """The same random numbers for every test, whatever ran before. Plain tests do not pay for importing torch."""
    random.seed(0)
    if request.path.parent.name in _PLAIN_DIRECTORIES:
        return
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _frozen(request: pytest.FixtureRequest) -> None:
    """Half a million objects of torch and transformers are not looked at in each collection of garbage."""
    if request.path.parent.name in _PLAIN_DIRECTORIES and "torch" not in sys.modules:
        return
    is_ours = bool({"runtime", "attack"} & set(request.path.parts))
    if is_ours and importlib.util.find_spec("transformers") is not None:  # GPU machines often lack it
        from tests.support import zoo

        zoo.plain_result("llama", 3)
    gc.collect()
    gc.freeze()
