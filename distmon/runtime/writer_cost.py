"""What training loses to the writer process where there is no core to spare for it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


class WriterCost:
    """CPU time of the writer while the threads of the training are on all cores of the host.

    It runs in place of one of them then, and what they share waits for that one: two threads of
    torch on two cores lost 8 ms by each 6.5 ms of the writer. Elsewhere it has a core of its own.
    """

    def __init__(
        self,
        cpu_seconds: Callable[[], float],
        device: torch.device,
        processes: int,
        cores: int | None = None,
    ) -> None:
        """`cpu_seconds` of the writer so far; `processes` of the training on this host."""
        self._cpu_seconds = cpu_seconds
        self._processes = processes if device.type == "cpu" else 0
        self._cores = _cores() if cores is None else cores
        self._before = cpu_seconds()

    def take(self) -> float:
        """Return the seconds since the last call; 0 where training has left it a core."""
        now = self._cpu_seconds()
        before, self._before = self._before, now
        if torch.get_num_threads() * self._processes < self._cores:
            return 0.0
        return now - before if now >= before else now  # of another writer


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
