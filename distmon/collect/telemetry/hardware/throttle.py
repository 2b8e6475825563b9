"""Throttle reasons of a device: one set of bits for all vendors, with descriptions."""

from __future__ import annotations

from typing import Final

IDLE: Final = 0x1
APPLICATION_CLOCKS: Final = 0x2
POWER_CAP: Final = 0x4
HARDWARE_SLOWDOWN: Final = 0x8
SYNC_BOOST: Final = 0x10
SOFTWARE_THERMAL: Final = 0x20
HARDWARE_THERMAL: Final = 0x40
POWER_BRAKE: Final = 0x80
DISPLAY_CLOCKS: Final = 0x100

REASONS: Final[dict[int, str]] = {
    IDLE: "idle",
    APPLICATION_CLOCKS: "clocks set by the user",
    POWER_CAP: "power limit reached",
    HARDWARE_SLOWDOWN: "hardware slowdown (heat, power supply or power brake)",
    SYNC_BOOST: "limited to the clocks of another GPU (sync boost)",
    SOFTWARE_THERMAL: "too hot, throttled by the driver",
    HARDWARE_THERMAL: "too hot, throttled by the hardware",
    POWER_BRAKE: "power brake signal from the power supply",
    DISPLAY_CLOCKS: "clocks set for a display",
    0x200: "limit of the board",
    0x400: "limit for reliability",
}
"""The bits are NVML's; readers of other vendors translate into them."""

_HARMLESS: Final = IDLE | APPLICATION_CLOCKS | DISPLAY_CLOCKS


def throttle_words(reasons: int) -> list[str]:
    """Return the descriptions of the bits, lowest first; unknown bits as a number."""
    bits = [1 << shift for shift in range(reasons.bit_length()) if reasons >> shift & 1]
    return [REASONS.get(bit, f"unknown reason {bit:#x}") for bit in bits]


def unexpected_reasons(reasons: int) -> int:
    """Return the bits other than idle and clocks that the user or a display set.

    `POWER_CAP` is included although it is common under full load; rules may ignore it.
    """
    return reasons & ~_HARMLESS
