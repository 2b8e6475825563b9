"""Talking to an accelerator without waiting for it."""

from __future__ import annotations

import torch


class DeviceMark:
    """Made where the stream is now; `done()` asks without waiting, `wait()` waits."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """Whether everything queued before the mark has run."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when everything queued before the mark has run."""
        self._event.synchronize()


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` that is queued, not waited for: only pinned memory can be copied so."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
