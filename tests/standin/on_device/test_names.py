"""What lowtide says of a device that has the names of torch_npu: one that tells no PCI address, and cannot show kernels
main memory. Run with torch_npu's own names too (`LOWTIDE_STANDIN=npu`)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.engines.accelerator import AcceleratorEngine
from lowtide.engines.device_ops import TorchDevice
from lowtide.errors import ConfigError
from lowtide.report.doctor import examine
from tests.standin import device

HERE = torch.device(device.NAME, 0)


def test_the_names_are_those_that_were_asked_for() -> None:
    asked = "npu" if os.environ["LOWTIDE_STANDIN"] == "npu" else "standin"
    assert asked == device.NAME
    assert torch.accelerator.current_accelerator() == torch.device(device.NAME)
    assert torch.get_device_module(HERE) is getattr(torch, device.NAME)
    assert not hasattr(torch.get_device_module(HERE).get_device_properties(HERE), "pci_bus_id")


def test_doctor_says_that_copy_threads_are_not_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no npu-smi
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    findings = {each.what: each for each in examine(str(tmp_path), measures=False, root=tmp_path)}
    assert findings["NUMA"].found == (
        "2 nodes, and neither the device nor npu-smi says which is near: copy threads are not bound"
    )
    assert "npu-smi info -t topo" in findings["NUMA"].advice


def test_slabs_and_copy_threads_of_an_engine_are_left_where_they_are() -> None:
    before = os.sched_getaffinity(0)
    engine = AcceleratorEngine(HERE, 8 << 20)
    assert TorchDevice(HERE).local_cpus is None
    engine.close()
    assert os.sched_getaffinity(0) == before


def test_state_that_kernels_read_in_place_is_refused_by_name() -> None:
    model = torch.nn.Linear(64, 64).to(HERE)
    text = (
        f"lowtide.swap_optimizer: tier 'mapped': kernels of '{device.NAME}' cannot be shown main memory that the host "
        "sees too; use tier 'host'"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        lowtide.swap_optimizer(torch.optim.AdamW(model.parameters()), tier="mapped", min_bytes=0)
