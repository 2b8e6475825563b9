"""The thread between the driver and the training thread."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fake_driver import FakeDriver, gpu, uuid_of, wanted

from distmon.collect.telemetry.hardware import (
    HardwareReading,
    HardwareSampler,
    throttle_words,
    unexpected_reasons,
)
from distmon.collect.telemetry.hardware.nvml import open_nvml
from distmon.collect.telemetry.hardware.reading import OpenResult


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Scripted:
    """A reader that gives one prepared reading after the other, each when it is let go."""

    device = "scripted"

    def __init__(self, *readings: HardwareReading | Exception) -> None:
        self.missing: dict[str, str] = {}
        self.readings: Iterator[HardwareReading | Exception] = iter(readings)
        self.turn = threading.Semaphore(0)
        self.threads: set[threading.Thread] = set()
        self.given = 0
        self.closed = 0

    def open(self) -> OpenResult:
        self.threads.add(threading.current_thread())
        return OpenResult(self, None)

    def read(self) -> HardwareReading:
        self.threads.add(threading.current_thread())
        self.turn.acquire()
        self.given += 1
        reading = next(self.readings, HardwareReading())
        if isinstance(reading, Exception):
            raise reading
        return replace(reading)

    def close(self) -> None:
        self.threads.add(threading.current_thread())
        self.closed += 1


def step(sampler: HardwareSampler, reader: Scripted) -> None:
    """Let the sampler read once more and publish it."""
    before = sampler.latest()
    reader.turn.release()
    wait_until(lambda: sampler.latest() is not before)


def steps(number: int, sampler: HardwareSampler, reader: Scripted) -> None:
    for _ in range(number):
        step(sampler, reader)


def quick(reader: Scripted) -> HardwareSampler:
    return HardwareSampler(reader.open, period_s=0, retry_s=0)


def end(sampler: HardwareSampler, reader: Scripted) -> None:
    reader.turn.release(100)
    sampler.close(timeout_s=5)


def test_means_maxima_newest_values_and_all_throttle_reasons_since_the_last_take() -> None:
    reader = Scripted(
        HardwareReading(
            power_watts=100, temperature_c=80, ecc_corrected=1, throttle_reasons=4, samples=1
        ),
        HardwareReading(power_watts=300, temperature_c=70, ecc_corrected=3, samples=1),
        HardwareReading(power_watts=math.nan, temperature_c=60, throttle_reasons=64, samples=1),
        HardwareReading(power_watts=10, temperature_c=50, samples=1),
    )
    sampler = quick(reader)
    assert sampler.take() == sampler.latest() == HardwareReading()
    steps(3, sampler, reader)
    taken = sampler.take()
    assert (taken.power_watts, taken.temperature_c, taken.ecc_corrected) == (200, 80, 3)
    assert (taken.throttle_reasons, taken.samples, taken.problem) == (4 | 64, 3, None)
    assert math.isnan(taken.sm_clock_mhz)
    again = sampler.take()
    assert (again.temperature_c, again.samples) == (60, 0)
    step(sampler, reader)
    taken = sampler.take()
    assert (taken.power_watts, taken.throttle_reasons, taken.samples) == (10, None, 1)
    end(sampler, reader)


def test_a_problem_is_reported_once_and_again_after_a_recovery() -> None:
    lost = HardwareReading(problem="GPU is lost", samples=1)
    well = HardwareReading(power_watts=1, samples=1)
    reader = Scripted(well, lost, lost, well, lost, well)
    sampler = quick(reader)
    steps(2, sampler, reader)
    assert sampler.take() == HardwareReading(power_watts=1, samples=1, problem="GPU is lost")
    step(sampler, reader)
    assert sampler.latest().problem == "GPU is lost"
    assert sampler.take() == HardwareReading()
    step(sampler, reader)
    assert sampler.take() == well
    steps(2, sampler, reader)  # lost and well again between two takes: still told
    assert sampler.take() == HardwareReading(power_watts=1, samples=1, problem="GPU is lost")
    assert reader.closed == 3  # opened anew after each problem
    end(sampler, reader)


def test_a_reader_that_raises_is_a_problem_and_is_opened_again() -> None:
    reader = Scripted(RuntimeError("the binding broke."), HardwareReading(power_watts=7, samples=1))
    sampler = quick(reader)
    step(sampler, reader)
    assert sampler.latest().problem == "the binding broke"
    step(sampler, reader)
    assert sampler.latest().power_watts == 7
    end(sampler, reader)


def test_only_the_own_thread_touches_the_reader() -> None:
    reader = Scripted(HardwareReading(samples=1))
    sampler = HardwareSampler(reader.open, period_s=60)
    step(sampler, reader)
    sampler.latest()
    sampler.take()
    sampler.close(timeout_s=5)
    assert reader.closed == 1
    (thread,) = reader.threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert not thread.is_alive()


def test_without_a_reader_the_reason_stays_and_the_thread_ends() -> None:
    opened = 0

    def open_reader() -> OpenResult:
        nonlocal opened
        opened += 1
        return OpenResult(None, "NVML cannot be initialized")

    sampler = HardwareSampler(open_reader, period_s=0, retry_s=0)
    wait_until(lambda: sampler.latest().problem is not None)
    sampler.close(timeout_s=5)
    assert sampler.latest() == HardwareReading(problem="NVML cannot be initialized")
    assert [sampler.take().problem, sampler.take().problem] == ["NVML cannot be initialized", None]
    assert (opened, sampler.device) == (1, None)


def test_problems_are_retried_at_a_slower_rate() -> None:
    reader = Scripted(HardwareReading(problem="GPU is lost", samples=1), HardwareReading())
    sampler = HardwareSampler(reader.open, period_s=0, retry_s=60)
    step(sampler, reader)
    reader.turn.release()
    time.sleep(0.05)
    assert reader.given == 1
    sampler.close(timeout_s=5)


@pytest.mark.parametrize("call", ["nvmlDeviceGetPowerUsage", "nvmlInitWithFlags"])
def test_a_hanging_driver_blocks_nothing(driver: FakeDriver, call: str) -> None:
    clock = [0.0]
    driver.write(gpu(0), f"hang {call}")
    opener = functools.partial(open_nvml, wanted(uuid=uuid_of(0)), driver.nvml)
    start = time.monotonic()
    sampler = HardwareSampler(opener, period_s=0.001, patience_s=10, now=lambda: clock[0])
    assert sampler.latest() == HardwareReading()
    clock[0] = 10.5
    wait_until(lambda: sampler.latest().problem is not None)
    assert sampler.latest().problem == "the driver has not responded for 10 s"
    assert sampler.take().problem == "the driver has not responded for 10 s"
    assert sampler.take().problem is None
    sampler.close(timeout_s=0.05)
    assert time.monotonic() - start < 60  # the driver hangs for ever
    driver.write(gpu(0))  # let the thread go


def test_waiting_for_the_next_reading_is_no_silence_of_the_driver() -> None:
    clock = [0.0]
    reader = Scripted(HardwareReading(power_watts=5, samples=1))
    sampler = HardwareSampler(reader.open, period_s=60, now=lambda: clock[0])
    step(sampler, reader)
    clock[0] = 50.0
    assert sampler.latest() == HardwareReading(power_watts=5, samples=1)
    sampler.close(timeout_s=5)


def test_after_a_hang_and_after_a_loss_readings_come_again(driver: FakeDriver) -> None:
    clock = [0.0]
    driver.write(gpu(0), gpu(1))
    opener = functools.partial(open_nvml, wanted(uuid=uuid_of(1)), driver.nvml)
    sampler = HardwareSampler(opener, period_s=0.001, retry_s=0.001, now=lambda: clock[0])
    wait_until(lambda: sampler.latest().temperature_c == 61)
    assert sampler.device == f"Fake-1 GPU-{uuid_of(1)}"
    for trouble in ("hang nvmlDeviceGetClockInfo", f"lost GPU-{uuid_of(1)} 0"):
        driver.write(gpu(0), gpu(1, heat=90), trouble)
        wait_until(lambda: clock.append(clock.pop() + 1) or sampler.latest().problem is not None)
        assert math.isnan(sampler.latest().temperature_c)
        driver.write(gpu(0), gpu(1, power=None))
        wait_until(lambda: sampler.latest().problem is None)
        wait_until(lambda: sampler.latest().temperature_c == 61)
        wait_until(lambda: sampler.missing == {"power_watts": "Not Supported"})
    sampler.close(timeout_s=5)


def test_descriptions_of_throttle_reasons() -> None:
    assert throttle_words(0) == []
    assert throttle_words(0x1 | 0x40) == ["idle", "too hot, throttled by the hardware"]
    assert throttle_words(1 << 40) == ["unknown reason 0x10000000000"]
    assert unexpected_reasons(0x1 | 0x2 | 0x100) == 0
    assert unexpected_reasons(0x1 | 0x4 | 0x8) == 0x4 | 0x8
