"""Numbers of a device on the host, without waiting for the device."""

from __future__ import annotations

import torch

from distmon.device import DeviceMark


class HostNumbers:
    """Copies a vector of numbers to the host.

    On a CPU `exchange` returns the numbers that it is given. On an accelerator it begins their copy
    and returns those of the call before, or None while they have not arrived.
    """

    def __init__(self) -> None:
        self._on_the_way: tuple[torch.Tensor, DeviceMark] | None = None

    def exchange(self, numbers: torch.Tensor) -> list[float] | None:
        """Return the newest numbers that are on the host."""
        if numbers.is_cpu:
            return [float(number) for number in numbers.tolist()]
        arrived, self._on_the_way = self._on_the_way, None
        host = torch.empty(numbers.shape, dtype=torch.float64, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        self._on_the_way = host, DeviceMark(numbers.device)
        if arrived is None or not arrived[1].done():
            return None
        return [float(number) for number in arrived[0].tolist()]
