from __future__ import annotations

import dataclasses
import math
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distmon.collect.telemetry.memory import MemoryReading, ResidentMemory, read_memory
from distmon.rules.memory_trend import FEWEST, sustained_growth

MB = 2**20


def counters(_device: torch.device) -> dict[str, Any]:
    """What torch's allocator tells, in its own shape."""
    return {
        "allocated_bytes": {"all": {"current": 600, "peak": 900}},
        "reserved_bytes": {"all": {"current": 1000, "peak": 1000}},
        "inactive_split_bytes": {"all": {"current": 250, "peak": 300}},
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }


def test_the_allocator_of_a_gpu() -> None:
    reading = read_memory(torch.device("cuda", 1), counters, lambda device: 8000.0 + device.index)
    assert dataclasses.replace(reading, rss_bytes=0) == MemoryReading(
        allocated_bytes=600,
        reserved_bytes=1000,
        peak_bytes=900,
        fragmentation=0.25,
        retries=3,
        ooms=1,
        device_total_bytes=8001,
        rss_bytes=0,
    )


def test_without_an_accelerator_only_the_process_is_known() -> None:
    for reading in (
        read_memory(torch.device("cpu")),
        read_memory(torch.device("cuda"), stats=lambda _device: {}),
    ):
        assert reading == MemoryReading(rss_bytes=reading.rss_bytes)


def test_the_names_of_the_counters_are_those_of_this_torch() -> None:
    documented = torch.cuda.memory_stats.__doc__
    assert documented is not None
    for name in ("num_alloc_retries", "num_ooms", "allocated_bytes", "reserved_bytes"):
        assert name in documented
    assert "inactive_split_bytes" in documented


def test_resident_memory_is_the_second_number_in_pages(tmp_path: Path) -> None:
    statm = tmp_path / "statm"
    statm.write_text("900 25 7 1 0 300 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    rarely, resident = ResidentMemory(statm, period_s=1e6), ResidentMemory(statm, period_s=0.0)
    assert rarely.bytes() == resident.bytes() == 25 * page
    statm.write_text("900 31 7 1 0 300 0\n")  # the file stays open
    assert resident.bytes() == 31 * page
    assert rarely.bytes() == 25 * page
    rarely.close()
    assert read_memory(torch.device("cpu"), rss=resident.bytes()).rss_bytes == 31 * page
    resident.close()
    resident.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_this_process_is_neither_tiny_nor_larger_than_its_peak() -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = ResidentMemory()
    assert 20 * MB < resident.bytes() < peak + 20 * MB
    resident.close()


def test_no_proc_no_number(tmp_path: Path) -> None:
    resident = ResidentMemory(tmp_path / "statm", period_s=0.0)
    assert math.isnan(resident.bytes())
    (tmp_path / "statm").write_text("garbage")
    assert math.isnan(resident.bytes())
    resident.close()


def sawtooth(length: int, seed: int) -> list[float]:
    """An allocator that grows for a few observations and gives back at once, with spikes."""
    rng = random.Random(seed)
    values, level = [], 0.0
    for _ in range(length):
        level = 0.0 if rng.random() < 0.15 else level + rng.uniform(0, 20) * MB
        values.append(8000 * MB + level + (500 * MB if rng.random() < 0.03 else 0))
    return values


STEPS = [float(100 * i) for i in range(400)]
"""An observation every 100 steps."""


def per_value(values: list[float]) -> float:
    """In MB."""
    return sustained_growth(values, STEPS[: len(values)]) * 100 / MB


@pytest.mark.parametrize(("length", "least"), [(128, 0.5), (256, 0.95)])
def test_a_leak_is_found_in_a_sawtooth_and_a_sawtooth_is_no_leak(length: int, least: float) -> None:
    teeth = [sawtooth(length, seed) for seed in range(100)]
    leaking = [[value + i * MB for i, value in enumerate(saw)] for saw in teeth]
    found = sorted(map(per_value, leaking))
    assert least < found[5] <= found[95] < 1.05
    assert sorted(map(per_value, teeth))[95] < 0.05


@pytest.mark.parametrize("warm", [5, 60, 120, 134])
def test_growth_while_warming_up_that_has_ended_is_no_leak(warm: int) -> None:
    smooth = [min(i, warm) * 50.0 * MB for i in range(256)]
    assert per_value(smooth) == 0
    teeth = [sawtooth(256, seed) for seed in range(20)]
    rough = [[a + b for a, b in zip(smooth, saw, strict=True)] for saw in teeth]
    assert sorted(map(per_value, rough))[18] < 0.05


def test_halves_that_disagree_are_no_trend() -> None:
    up_and_down = [float(min(i, 256 - i) * MB) for i in range(256)]
    assert per_value(up_and_down) == 0
    assert per_value([-value for value in up_and_down]) == 0


def test_only_the_newest_values_count() -> None:
    shrank_then_leaks = [-i * 50.0 * MB for i in range(144)] + [i * MB * 1.0 for i in range(256)]
    assert per_value(shrank_then_leaks) == pytest.approx(1)
    leaked_then_not = [min(i, 200) * 1.0 * MB for i in range(400)]
    assert per_value(leaked_then_not) == 0


def test_falling_and_uneven_steps_and_gaps() -> None:
    steps = [float(i * i) for i in range(140)]
    assert sustained_growth([-3 * step for step in steps], steps) == pytest.approx(-3)
    with_gaps = [math.nan if i % 30 == 0 else 2 * step for i, step in enumerate(steps)]
    assert sustained_growth(with_gaps, steps) == pytest.approx(2)
    assert sustained_growth([1.0, 2.0] * 64, [7.0] * 128) == 0


def test_too_little_is_no_slope() -> None:
    assert math.isnan(sustained_growth([], []))
    assert math.isnan(sustained_growth([1.0] * (FEWEST - 1), STEPS[: FEWEST - 1]))
    assert math.isnan(sustained_growth([math.nan] * 200, STEPS[:200]))
    assert sustained_growth([1.0] * FEWEST, STEPS[:FEWEST]) == 0
