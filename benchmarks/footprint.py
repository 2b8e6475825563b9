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
from distmon_benchmarks.counting import count
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
    training = Training.begin(workload, dtype, device)
    training.turn(Session())
    bare = count(lambda: training.turn(Session()))
    meter = meter_for(device)
    found: dict[str, float] = {}
    bare_peak = 0
    before = 0
    if meter is not None:
        bare_peak = _step_peak(training, Session(), meter)
        meter.tidy()
        before = meter.now()
    session = contender.attach(training.model, training.optimizer, folder / "run")
    training.turn(session)  # many make their buffers at the first observation
    if meter is not None:
        meter.tidy()
        kept = max(0, meter.now() - before)
        if contender.timing == "whole step":
            moment = _step_peak(training, session, meter) - bare_peak
        else:
            scales = Scales(session, meter)
            training.turn(scales)
            moment = scales.peak
        found["kept_memory"] = kept
        found["extra_memory"] = kept + max(0, moment)
    counts = count(lambda: training.turn(session)) - bare
    session.detach()
    found["launches"] = counts.launches
    found["host_syncs"] = counts.host_syncs
    return found


def _rehearse(contender: Contender, dtype: Dtype, device: torch.device, folder: Path) -> None:
    """The code of a library is no cost of watching this model."""
    training = Training.begin(REHEARSAL, dtype, device)
    session = contender.attach(training.model, training.optimizer, folder)
    for _ in range(2):
        training.turn(session)
    session.detach()


def _step_peak(training: Training, session: Session, meter: Meter) -> int:
    """Memory that a whole step takes beyond what there was before it."""
    training.optimizer.zero_grad()
    meter.tidy()
    before = meter.begin()
    training.turn(session)
    return meter.peak() - before


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
