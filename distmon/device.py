"""Marks on a device's stream, and copies to a device, without waiting for it."""

from __future__ import annotations

import torch


class DeviceMark:
    """An event at the current end of the stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """Return whether everything queued before the mark has run."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when everything queued before the mark has run."""
        self._event.synchronize()


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on `device` that is queued, not waited for; only pinned memory allows that."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
