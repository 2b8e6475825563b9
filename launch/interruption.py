"""Ctrl-C: finish the step, save, leave, on all ranks at the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
from ranks import Ranks

CHECK_EVERY = 5  # steps; ranks have to agree where to stop, and asking costs a collective


class Interruption:
    """While active, SIGINT and SIGTERM ask the training loop to stop instead of killing it.

    Alone, a second signal kills. Under torchrun it does not, because torchrun passes on the Ctrl-C
    that the terminal has sent to every rank already, and itself kills ranks that take too long.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def requested(self, step: int) -> bool:
        """Whether to stop after this step. Every rank asks in every step; all get one answer."""
        if not self._ranks.grouped:
            return self._asked
        if step % CHECK_EVERY:
            return False
        return bool(self._ranks.total(torch.tensor(int(self._asked))))

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._asked = True
        if not self._ranks.grouped:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
