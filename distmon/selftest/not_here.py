"""What a check of the self-test needs to know about the machine."""

from __future__ import annotations

from typing import Final

import torch

SIMULATED: Final = "Simulated GPU"
"""Name of the device of the tests: what it takes says nothing about a GPU."""


class NotHere(Exception):
    """The check needs something that this machine lacks."""


def device_name(device: torch.device) -> str:
    """Return the model of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def is_simulated(device: torch.device) -> bool:
    """Return whether this is the device of the tests."""
    return device_name(device) == SIMULATED
