"""The device as its driver sees it: memory, load, power, heat, clocks, errors."""

from distmon.telemetry.hardware.opening import DeviceDescription, describe_devices, opener_for
from distmon.telemetry.hardware.reading import NUMBERS, HardwareReading
from distmon.telemetry.hardware.sampler import HardwareSampler
from distmon.telemetry.hardware.throttle import alarming, throttle_words

__all__ = [
    "NUMBERS",
    "DeviceDescription",
    "HardwareReading",
    "HardwareSampler",
    "alarming",
    "describe_devices",
    "opener_for",
    "throttle_words",
]
