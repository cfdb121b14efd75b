"""Runs the tests that need an accelerator on the stand-in device, in processes of their own, since a process that has
the device has it for good.

Run one of them alone: `LOWTIDE_STANDIN=1 python -m pytest -n0 tests/standin/on_device/test_apply.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.standin import device
from tests.support import processes

ROOT = Path(__file__).parents[2]
ON_DEVICE = "tests/standin/on_device"


def run_group(folder: Path, marks: str, *words: str, seconds: float, names: str = "1") -> None:
    """Run the tests with these marks in a process that has the device. Fails with what they print."""
    command = ["-q", "-n0", "-p", "no:cacheprovider", "-m", marks, *words]
    code = f"import os, sys, pytest; os.chdir({str(ROOT)!r}); sys.exit(pytest.main(sys.argv[1:]))"
    has_device = {"LOWTIDE_STANDIN": names, "XDG_CACHE_HOME": str(folder)}
    status, out, err = processes.program(code, folder, *command, seconds=seconds, **has_device)
    if status is None:
        pytest.fail(f"not done after {seconds} s:\n{out[-2000:]}")
    if status != 0:
        pytest.fail(f"pytest {' '.join(command)} ended with {status}:\n{out[-8000:]}\n{err[-2000:]}")
    assert "skipped" not in out.splitlines()[-1], "the device is not there"


pytestmark = pytest.mark.skipif(device.why_not() is not None, reason=str(device.why_not()))


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_on_the_stand_in_device(tmp_path: Path) -> None:
    """With the file of the engine that `make gpu` runs on a GPU, as it is."""
    files = (ON_DEVICE, "tests/engines/test_accelerator.py")
    run_group(tmp_path, "not slow and not extended", *files, seconds=900)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_the_names_of_torch_npu(tmp_path: Path) -> None:
    """Engine, tiers, optimizer state, affinity and doctor, on `npu:0` and `npu:1`. Engines with a mistake on purpose
    are noticed whatever the device is called, and adversaries as well."""
    files = [f"{ON_DEVICE}/test_{name}.py" for name in ("names", "apply", "optimizer_state", "memory_runs_out")]
    which = ("-k", "not mistake and not adversary")
    run_group(tmp_path, "not slow and not extended", *which, *files, seconds=500, names="npu")


@pytest.mark.extended
@pytest.mark.timeout(3000)
def test_at_length_on_the_stand_in_device(tmp_path: Path) -> None:
    run_group(tmp_path, "slow or extended", ON_DEVICE, seconds=2900)
