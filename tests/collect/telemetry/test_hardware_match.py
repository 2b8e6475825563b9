from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from fake_driver import wanted

from distmon.collect.telemetry.hardware import NUMBERS, opener_for
from distmon.collect.telemetry.hardware.amd import open_amd
from distmon.collect.telemetry.hardware.device_match import (
    ComputeDevice,
    ListedDevice,
    compute_device,
    match,
)
from distmon.collect.telemetry.hardware.nvml import open_nvml


def board(uuid: str, bus: str = "") -> ListedDevice:
    return ListedDevice(uuid, uuid, uuid, uuid, bus)


TWO = [board("GPU-aaaa-1", "00000000:3B:00.0"), board("GPU-aabb-2", "00000000:0A:00.0")]
SLICED = [
    board("GPU-cc"),
    ListedDevice("MIG-dd", "h", "GPU-cc", "GPU-cc"),
    ListedDevice("MIG-ee", "h", "GPU-cc", "GPU-cc"),
]


@pytest.mark.parametrize(
    ("listed", "device", "found"),
    [
        (TWO, wanted(0, uuid="aabb-2"), "GPU-aabb-2"),
        (TWO, wanted(0, uuid="GPU-AABB-2"), "GPU-aabb-2"),
        (TWO, wanted(0, uuid="aabb-2", visible="0"), "GPU-aabb-2"),
        (TWO, wanted(1, visible="GPU-aab, GPU-aaa"), "GPU-aaaa-1"),
        (TWO, wanted(1, order_is_bus=True), "GPU-aaaa-1"),
        (TWO, wanted(0, visible="1,0", order_is_bus=True), "GPU-aaaa-1"),
        (TWO[:1], wanted(0), "GPU-aaaa-1"),
        (TWO[:1], wanted(0, visible="0"), "GPU-aaaa-1"),
        ([*TWO, board("GPU-aa")], wanted(0, visible="GPU-aa"), "GPU-aa"),
        (SLICED, wanted(0, uuid="ee"), "MIG-ee"),
        (SLICED, wanted(0, visible="MIG-e"), "MIG-ee"),
        (SLICED, wanted(0, uuid="cc", visible="MIG-dd"), "MIG-dd"),
        (SLICED[:2], wanted(0, uuid="cc"), "MIG-dd"),
        (SLICED[:2], wanted(0), "MIG-dd"),
    ],
)
def test_found(listed: list[ListedDevice], device: ComputeDevice, found: str) -> None:
    result = match(listed, device)
    assert isinstance(result, ListedDevice), result
    assert result.uuid == found


@pytest.mark.parametrize(
    ("listed", "device", "reason"),
    [
        ([], wanted(0, uuid="aa"), "aa is not among the listed devices (none)"),
        (TWO, wanted(0, uuid="zz"), "zz is not among"),
        (TWO, wanted(0, visible="GPU-aa"), "2 devices have a UUID that begins with GPU-aa"),
        (TWO, wanted(0, visible="MIG-aab"), "MIG-aab is not among"),
        (TWO, wanted(0, visible="GPU-"), "GPU- is not among"),
        (TWO, wanted(0), "its index does not identify it"),
        (TWO, wanted(0, visible="1"), "its index does not identify it"),
        (TWO, wanted(2, visible="GPU-aaa", order_is_bus=True), "its index does not identify it"),
        (TWO, wanted(0, visible="7", order_is_bus=True), "its index does not identify it"),
        (SLICED, wanted(0, uuid="cc"), "has 2 MIG devices"),
        (SLICED, wanted(0), "has 2 MIG devices"),
        ([*SLICED, *TWO], wanted(0, order_is_bus=True), "its index does not identify it"),
    ],
)
def test_a_failed_match_gives_the_reason(
    listed: list[ListedDevice], device: ComputeDevice, reason: str
) -> None:
    result = match(listed, device)
    assert isinstance(result, str)
    assert reason in result


def test_one_device_that_answers_beside_one_that_does_not_is_no_certainty() -> None:
    assert isinstance(match(TWO[:1], wanted(0), unresponsive=1), str)
    assert isinstance(match(TWO[:1], wanted(0, order_is_bus=True), unresponsive=1), str)


class Properties:
    """As torch gives them for a device."""

    uuid = "aa-1"


def test_the_reader_of_a_torch_device() -> None:
    second = torch.device("cuda", 1)
    environ = {"CUDA_VISIBLE_DEVICES": "3,2"}
    for is_amd, opens in ((False, open_nvml), (True, open_amd)):
        opener = opener_for(second, environ, lambda _device: Properties(), is_amd)
        assert isinstance(opener, functools.partial)
        assert (opener.func, opener.args) == (opens, (wanted(1, "aa-1", "3,2"),))
    assert opener_for(torch.device("cpu"), environ) is None


def test_description_of_the_device_of_this_process() -> None:
    assert compute_device(3, Properties(), {"CUDA_VISIBLE_DEVICES": "1"}) == wanted(3, "aa-1", "1")
    assert compute_device(0, object(), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == wanted(
        0, order_is_bus=True
    )
    both = {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}
    assert compute_device(0, object(), both, amd=True) == wanted(0, visible="2")
    assert compute_device(0, object(), both) == wanted(0, visible="1")
    assert compute_device(0, object(), both | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, amd=True) == (
        wanted(0, visible="2")
    )


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/hardware.md").read_text()
    for field in NUMBERS:
        unit, meaning, over = (field.metadata[key] for key in ("unit", "help", "summary"))
        row = f"| `{field.name}` | {unit} | {meaning} | {over} |".replace("|  |", "| |")
        assert row in page
