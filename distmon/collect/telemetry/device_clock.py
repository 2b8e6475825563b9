"""Time that the monitor's own kernels take on the device, between pairs of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from distmon.device import DeviceMark, is_accelerator, is_capturing

MOST_SPANS = 256
"""Spans that are kept while a device is behind; of more, the newest."""


class DeviceClock:
    """Adds up spans of device time; on a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on = is_accelerator(device)
        self._spans: deque[tuple[DeviceMark, DeviceMark]] = deque(maxlen=MOST_SPANS)

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work` with `arguments`, and count what it queues."""
        if not self._on or is_capturing(self._device):
            work(*arguments)
            return
        begin = DeviceMark(self._device, timing=True)
        try:
            work(*arguments)
        finally:
            self._spans.append((begin, DeviceMark(self._device, timing=True)))

    def take(self) -> float:
        """Return the seconds of the spans that the device has passed since the last call."""
        total = 0.0
        while self._spans:
            begin, end = self._spans[0]
            seconds = end.seconds_since(begin)
            if seconds is None:
                break
            total += seconds
            self._spans.popleft()
        return total
