"""A point in the work queued on an accelerator, to ask later whether it has been reached."""

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
