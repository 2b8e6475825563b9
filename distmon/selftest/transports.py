"""The checks of the two transports: two ranks train with each, as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from distmon.device import is_accelerator
from distmon.selftest.not_here import NotHere

RANKS: Final = 2
RANK_PROGRAM: Final = "distmon.selftest.rank"
TIMEOUT_S: Final = 600
"""Of both ranks together; a collective that hangs fails after 120 s."""


def check_transport(
    transport: str, device: torch.device, rank_program: str, alone: Callable[[], dict[str, float]]
) -> str:
    """Train two ranks with `transport`; the records must be those of one process.

    `rank_program` is run as `python -m`, see `rank.py`. `alone` trains in one process.
    """
    if transport == "device" and one_for_both(device):
        raise NotHere(f"two ranks need two devices, and there is one {device.type} device")
    with tempfile.TemporaryDirectory() as folder:
        _run(rank_program, [folder, transport, device.type], Path(folder))
        texts = {(Path(folder) / f"rank{rank}").read_text() for rank in range(RANKS)}
    assert len(texts) == 1, f"the ranks have different records: {' and '.join(sorted(texts))}"
    found, expected = json.loads(texts.pop()), alone()
    for name, value in expected.items():
        # Sums over two ranks are added in another order.
        assert abs(found[name] - value) <= 1e-6 * abs(value), (name, found[name], value)
    shared = ", which share one device" if one_for_both(device) else ""
    return f"{RANKS} ranks{shared}: equal records, and those of one process"


def one_for_both(device: torch.device) -> bool:
    """Return whether the ranks must share a device, which NCCL refuses."""
    return is_accelerator(device) and torch.accelerator.device_count() < RANKS


def _run(program: str, arguments: list[str], folder: Path) -> None:
    """Run the ranks to their end; raise with the last line of the first that failed.

    One with a result has not failed: threads of torch may abort a process while it ends.
    """
    processes = []
    for rank in range(RANKS):
        with (folder / f"errors{rank}").open("w") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", program, *arguments],
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
    end = time.monotonic() + TIMEOUT_S
    try:
        while any(process.poll() is None for process in processes):
            failed = [
                rank
                for rank, process in enumerate(processes)
                if process.poll() and not (folder / f"rank{rank}").exists()
            ]
            if failed or time.monotonic() > end:
                break  # the other one would wait for it
            time.sleep(0.02)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, code in enumerate(codes):
        if code and not (folder / f"rank{rank}").exists():
            lines = (folder / f"errors{rank}").read_text().strip().splitlines() or ["no message"]
            raise RuntimeError("\n".join([f"rank {rank}: {lines[-1]}", *lines[-40:]]))
    late = [str(rank) for rank, code in enumerate(codes) if code is None]
    if late:
        raise TimeoutError(f"rank {' and '.join(late)} did not end within {TIMEOUT_S} s")
