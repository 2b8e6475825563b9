"""Why a device runs slower than it could: one set of bits for every vendor, in words."""

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
    SYNC_BOOST: "held to the clocks of another GPU (sync boost)",
    SOFTWARE_THERMAL: "too hot, slowed down by the driver",
    HARDWARE_THERMAL: "too hot, slowed down by the hardware",
    POWER_BRAKE: "power brake signal from the power supply",
    DISPLAY_CLOCKS: "clocks set for a display",
    0x200: "limit of the board",
    0x400: "limit for reliability",
}
"""The bits are NVML's; readers of other vendors translate into them."""

_HARMLESS: Final = IDLE | APPLICATION_CLOCKS | DISPLAY_CLOCKS


def throttle_words(reasons: int) -> list[str]:
    """The bits in words, lowest first; a bit without a name is given as a number."""
    bits = [1 << place for place in range(reasons.bit_length()) if reasons >> place & 1]
    return [REASONS.get(bit, f"unknown reason {bit:#x}") for bit in bits]


def alarming(reasons: int) -> int:
    """The bits that nobody asked for: without idle and clocks that somebody has set.

    `POWER_CAP` stays in: it is common under full load, so a rule may want to be milder about it.
    """
    return reasons & ~_HARMLESS
