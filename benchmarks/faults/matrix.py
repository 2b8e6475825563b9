"""Run faults one by one, each in a process of its own, against the unmonitored twin."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.faults import code, storage
from benchmarks.faults.scene import FAULT_AT, LONGEST_S, STEPS, Fault, Outcome, train

SAID: Final = (
    *("lost", "dropped", "incomplete", "abandoned", "disabled", "instead", "did not finish"),
    *("nothing more is recorded", "without this observation", "monitoring ends"),
)
"""Words of messages which say that records are missing, or where they are."""


@dataclass(frozen=True)
class Result:
    """The outcome of one fault."""

    fault: Fault
    outcome: Outcome
    same_losses: bool
    stall_s: float
    """Longest step, beyond the longest of the twin."""

    @property
    def survived(self) -> bool:
        """Whether training went on as without the monitor."""
        bad = self.outcome.hang or self.outcome.reached_loop or not self.same_losses
        return not bad

    @property
    def lost_silently(self) -> int:
        """Records that are missing, and nothing says so."""
        if self.fault.ends or self.outcome.named or self.outcome.refused:
            return 0
        if any(word in line for line in self.outcome.messages for word in SAID):
            return 0
        first = FAULT_AT + 1 if self.fault.takes else 1
        return sum(step >= first for step in self.outcome.missing)


def all_faults() -> list[Fault]:
    """Return the whole matrix."""
    return [*storage.faults(), *code.faults()]


def run_faults(faults: Sequence[Fault], writer: str) -> Iterator[Result]:
    """Yield the result of each fault."""
    twins = [_in_child(None, writer) for _ in range(2)]
    longest = max(twin.longest_s for twin in twins)
    for fault in faults:
        outcome = _in_child(fault, writer)
        same = outcome.losses == twins[0].losses and len(outcome.losses) == STEPS
        yield Result(fault, outcome, same, max(0.0, outcome.longest_s - longest))


def _in_child(fault: Fault | None, writer: str) -> Outcome:
    """Train in a forked process, which a fault may harm in any way."""
    folder = Path(tempfile.mkdtemp(prefix="distmon-fault-"))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            os.setsid()
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(os.open(folder.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)
            outcome = train(fault, folder, writer)
            with os.fdopen(write, "wb") as file:
                pickle.dump(outcome, file)
        finally:
            os._exit(0)
    os.close(write)
    outcome = _received(read, pid)
    errors = folder.with_suffix(".err")
    text = errors.read_text(errors="replace") if errors.exists() else ""
    if "Traceback (most recent call last)" in text and not outcome.traceback:
        outcome.traceback = text[:2000]
    errors.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _received(read: int, pid: int) -> Outcome:
    content = b""
    limit = time.monotonic() + LONGEST_S + 30
    with os.fdopen(read, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, limit - time.monotonic()))[0]:
            part = file.read(1 << 16)
            if not part:
                break
            content += part
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what a fault has left: pipes, stopped writers
    os.waitpid(pid, 0)
    try:
        found: Outcome = pickle.loads(content)
    except Exception:
        return Outcome(hang=not content, reached_loop="the process ended without a result")
    return found
