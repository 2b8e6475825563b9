"""Measure what a contender needs besides time: memory, operations and host synchronizations.

Each in a fresh process: memory that one contender has freed would hide what the next one needs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from distmon.bench.contender import Contender, Session
from distmon.bench.counting import Counts, count
from distmon.bench.memory import Meter, meter_for
from distmon.bench.training import Dtype, Training, Workload
from distmon.errors import DistmonError


class FootprintError(DistmonError):
    """The process of a contender failed."""


def footprint(
    workload: Workload, dtype: Dtype, contender: Contender, device: torch.device
) -> Mapping[str, float]:
    """Return extra_memory, kept_memory, host_syncs and launches of one observation.

    Memory is missing where the system does not report it. Raises FootprintError when the process
    failed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    job = (workload, dtype, contender, device)
    process = context.Process(target=send_footprint, args=(theirs, job, torch.get_num_threads()))
    process.start()
    theirs.close()
    try:
        result: Mapping[str, float] | str = ours.recv()
    except EOFError:
        result = "its process ended without a result"
    process.join()
    if isinstance(result, str):
        raise FootprintError(result)
    return result


def send_footprint(
    connection: Connection, job: tuple[Workload, Dtype, Contender, torch.device], threads: int
) -> None:
    """Measure in this process and send the result, or the error as text."""
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            connection.send(measure_here(*job, Path(folder)))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def measure_here(
    workload: Workload, dtype: Dtype, contender: Contender, device: torch.device, folder: Path
) -> dict[str, float]:
    """Measure in this process; memory that was allocated in it before may hide some."""
    _load_code(contender, dtype, device, folder / "warm-up")
    training = Training.begin(workload, dtype, device, timed=False)
    meter = meter_for(device)
    training.step(Session())
    bare, bare_peak = _measured_step(training, Session(), meter)
    before = _settled(meter)
    session = contender.attach(training.model, training.optimizer, folder / "run")
    training.step(session)  # many allocate their buffers at the first observation
    kept = max(0, _settled(meter) - before)
    calls = CallMemory(session, meter) if meter and contender.timing == "directly" else None
    counts, peak = _measured_step(training, calls or session, None if calls else meter)
    session.detach()
    counts -= bare
    found: dict[str, float] = {"launches": counts.launches, "host_syncs": counts.host_syncs}
    if meter is not None:
        found["kept_memory"] = kept
        found["extra_memory"] = kept + max(0, calls.peak if calls else peak - bare_peak)
    return found


def _settled(meter: Meter | None) -> int:
    """Return the memory in use after everything unused was released."""
    if meter is None:
        return 0
    meter.release()
    return meter.now()


def _measured_step(training: Training, session: Session, meter: Meter | None) -> tuple[Counts, int]:
    """Return the operations of a step and its peak memory beyond what was in use before it."""
    training.optimizer.zero_grad()
    before = 0
    if meter is not None:
        meter.release()
        before = meter.begin()
    counts = count(lambda: training.step(session))
    return counts, meter.peak() - before if meter is not None else 0


def _load_code(contender: Contender, dtype: Dtype, device: torch.device, folder: Path) -> None:
    """Observe a small model first: loading a library is no cost of observing this model."""
    workload = Workload("warm-up", "two layers", _small_model, _small_loss)
    training = Training.begin(workload, dtype, device)
    session = contender.attach(training.model, training.optimizer, folder)
    for _ in range(2):
        training.step(session)
    session.detach()


def _small_model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(10)))


def _small_loss(model: nn.Module, device: torch.device) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    out: torch.Tensor = model(torch.randn(2, 8, device=device, dtype=dtype))
    return out.float().square().mean()


class CallMemory(Session):
    """Wraps a session and measures the memory of its calls."""

    def __init__(self, session: Session, meter: Meter) -> None:
        self._session = session
        self._meter = meter
        self._held = 0
        self.peak = 0
        """Maximum in a call, beyond what was in use before `before_step`."""

    def enable(self) -> None:
        self._session.enable()

    def before_step(self) -> None:
        self._meter.release()
        before = self._meter.begin()
        self._session.before_step()
        self.peak = self._meter.peak() - before
        self._held = self._meter.now() - before

    def after_step(self, loss: torch.Tensor) -> None:
        self._meter.release()
        before = self._meter.begin()
        self._session.after_step(loss)
        self.peak = max(self.peak, self._held + self._meter.peak() - before)

    def disable(self) -> None:
        self._session.disable()
