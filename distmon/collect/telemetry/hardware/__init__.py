"""Readings from the device's driver: memory, utilization, power, temperature, clocks, errors."""

from typing import TYPE_CHECKING

from distmon.lazy_exports import lazy_exports

if TYPE_CHECKING:
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
__getattr__ = lazy_exports(
    __name__,
    {
        "DeviceDescription": "distmon.collect.telemetry.hardware.open_reader",
        "describe_devices": "distmon.collect.telemetry.hardware.open_reader",
        "opener_for": "distmon.collect.telemetry.hardware.open_reader",
        "NUMBERS": "distmon.collect.telemetry.hardware.reading",
        "HardwareReading": "distmon.collect.telemetry.hardware.reading",
        "HardwareSampler": "distmon.collect.telemetry.hardware.sampler",
        "throttle_words": "distmon.collect.telemetry.hardware.throttle",
        "unexpected_reasons": "distmon.collect.telemetry.hardware.throttle",
    },
)
