"""Readings from the device's driver: memory, utilization, power, temperature, clocks, errors."""

from distmon.collect.telemetry.hardware.open_reader import (
    DeviceDescription,
    describe_devices,
    opener_for,
)
from distmon.collect.telemetry.hardware.reading import NUMBERS, HardwareReading
from distmon.collect.telemetry.hardware.sampler import HardwareSampler
from distmon.collect.telemetry.hardware.throttle import throttle_words, unexpected_reasons

__all__ = [
    "NUMBERS",
    "DeviceDescription",
    "HardwareReading",
    "HardwareSampler",
    "describe_devices",
    "opener_for",
    "throttle_words",
    "unexpected_reasons",
]
