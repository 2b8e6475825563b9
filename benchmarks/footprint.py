"""What a contender needs besides time: memory, operations and waits, in a process of its own.

A fresh process for each: what one has allocated and freed would hide what the next one needs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from distmon.errors import DistmonError
from distmon_benchmarks.contenders import Contender, Session, find
from distmon_benchmarks.counting import Counts, count
from distmon_benchmarks.memory import Meter, meter_for
from distmon_benchmarks.models import Matrices
from distmon_benchmarks.training import Training
from distmon_benchmarks.workloads import Dtype, Workload, square_loss

REHEARSAL = Workload(
    "rehearsal", "loads the code of libraries", partial(Matrices, 20, 8), partial(square_loss, 2, 8)
)


class FootprintError(DistmonError):
    """The process of a contender failed."""


def footprint(
    workload: Workload, dtype: Dtype, contender: str, device: torch.device
) -> Mapping[str, float]:
    """By measure: extra_memory, kept_memory, host_syncs and launches of one observation.

    Memory is missing where the system does not tell. A FootprintError when the process failed.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_run,
        args=(theirs, workload, dtype, contender, device, torch.get_num_threads()),
    )
    process.start()
    theirs.close()
    try:
        result: Mapping[str, float] | str = ours.recv()
    except EOFError:
        result = "its process ended without an answer"
    process.join()
    if isinstance(result, str):
        raise FootprintError(result)
    return result


def _run(
    answer: Connection,
    workload: Workload,
    dtype: Dtype,
    contender: str,
    device: torch.device,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    try:
        (found,) = find([contender])
        with tempfile.TemporaryDirectory() as folder:
            answer.send(measure(workload, dtype, found, device, Path(folder)))
    except Exception as error:
        answer.send(f"it failed with {type(error).__name__}: {error}")


def measure(
    workload: Workload, dtype: Dtype, contender: Contender, device: torch.device, folder: Path
) -> dict[str, float]:
    """In this process; what was allocated in it before may hide what the contender needs."""
    _rehearse(contender, dtype, device, folder / "rehearsal")
    training = Training.begin(workload, dtype, device, timed=False)
    meter = meter_for(device)
    training.turn(Session())
    bare, bare_peak = _weighed(training, Session(), meter)
    before = _settled(meter)
    session = contender.attach(training.model, training.optimizer, folder / "run")
    training.turn(session)  # many make their buffers at the first observation
    kept = max(0, _settled(meter) - before)
    scales = Scales(session, meter) if meter and contender.timing == "directly" else None
    counts, peak = _weighed(training, scales or session, None if scales else meter)
    session.detach()
    counts -= bare
    found: dict[str, float] = {"launches": counts.launches, "host_syncs": counts.host_syncs}
    if meter is not None:
        found["kept_memory"] = kept
        found["extra_memory"] = kept + max(0, scales.peak if scales else peak - bare_peak)
    return found


def _settled(meter: Meter | None) -> int:
    """Memory in use when everything that is not has been given back."""
    if meter is None:
        return 0
    meter.tidy()
    return meter.now()


def _weighed(training: Training, session: Session, meter: Meter | None) -> tuple[Counts, int]:
    """What a step does, and the memory that it takes beyond what there was before it."""
    training.optimizer.zero_grad()
    before = 0
    if meter is not None:
        meter.tidy()
        before = meter.begin()
    counts = count(lambda: training.turn(session))
    return counts, meter.peak() - before if meter is not None else 0


def _rehearse(contender: Contender, dtype: Dtype, device: torch.device, folder: Path) -> None:
    """The code of a library is no cost of watching this model."""
    training = Training.begin(REHEARSAL, dtype, device)
    session = contender.attach(training.model, training.optimizer, folder)
    for _ in range(2):
        training.turn(session)
    session.detach()


class Scales(Session):
    """Plays the part of a session and weighs its calls."""

    def __init__(self, session: Session, meter: Meter) -> None:
        self._session = session
        self._meter = meter
        self._held = 0
        self.peak = 0
        """Most memory in a call beyond what there was before `before_step`."""

    def wake(self) -> None:
        self._session.wake()

    def before_step(self) -> None:
        self._meter.tidy()
        before = self._meter.begin()
        self._session.before_step()
        self.peak = self._meter.peak() - before
        self._held = self._meter.now() - before

    def after_step(self, loss: torch.Tensor) -> None:
        self._meter.tidy()
        before = self._meter.begin()
        self._session.after_step(loss)
        self.peak = max(self.peak, self._held + self._meter.peak() - before)

    def sleep(self) -> None:
        self._session.sleep()
