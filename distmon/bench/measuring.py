"""Measure one case from beginning to end: times, answers and footprints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from distmon.bench.contender import Contender
from distmon.bench.footprint import FootprintError, footprint
from distmon.bench.interleaved import Lane, Rounds, race
from distmon.bench.results import Case, ResultsWriter
from distmon.bench.training import Dtype, Training, Workload
from distmon.bench.truth import FAR_ERRORS

Advance = Callable[[str], None]
"""Called with what is done next, once for everything that `steps` counts."""


def steps(contenders: Sequence[Contender], rounds: int, footprints: bool) -> int:
    """Return how often `measure` calls `advance`."""
    return rounds + 2 + (len(contenders) if footprints else 0)


def default_device() -> torch.device:
    """Return the accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(
    workload: Workload,
    dtype: Dtype,
    contenders: Sequence[Contender],
    writer: ResultsWriter,
    rounds: Rounds,
    *,
    footprints: bool = True,
    advance: Advance = lambda _: None,
) -> None:
    """Write everything about one workload in one dtype; `none` has to be among the contenders."""
    if reason := workload.does_not_fit(dtype):
        unbuilt = Case(workload.name, dtype, "none", 1, 0, workload.elements, workload.conditions)
        writer.add(unbuilt, "", "skipped", 0, 0.0, reason)
        return
    training = Training.begin(workload, dtype, default_device())
    case = training.case(workload, dtype)
    racing = [c for c in contenders if c.unavailable() is None]
    for contender in contenders:
        if reason := contender.unavailable():
            writer.add(case, contender.name, "skipped", 0, 0.0, reason)
    with tempfile.TemporaryDirectory() as folder:
        timed = f"{case.name}: times"
        lanes = race(training, racing, Path(folder), rounds, lambda: advance(timed))
    del training  # the processes below need the memory
    for lane in lanes:
        write_lane(writer, case, lane)
    if footprints:
        finished = [lane.contender for lane in lanes if lane.failed is None]
        _write_footprints(workload, dtype, finished, writer, case, advance)


def write_lane(writer: ResultsWriter, case: Case, lane: Lane) -> None:
    """Write the times of one contender and whether its answer was right; a failed one has none."""
    name, check = lane.contender.name, lane.check
    if lane.failed is not None:
        writer.add(case, name, "failed", 0, 0.0, lane.failed)
        return
    for found in lane.found:
        writer.add(case, name, found.measure, found.round, found.value)
    if not lane.contender.finds:
        return
    note = check.wrong or ""
    if not note and check.far_off:
        note = f"{check.far_off} of {check.estimates} sampled norms are more than "
        note += f"{FAR_ERRORS:g} standard errors off"
    writer.add(case, name, "answer", 0, float(check.wrong is None), note)


def _write_footprints(
    workload: Workload,
    dtype: Dtype,
    contenders: Sequence[Contender],
    writer: ResultsWriter,
    case: Case,
    advance: Advance,
) -> None:
    # Nothing is timed here, so two run at once where memory allows.
    at_once = 2 if workload.does_not_fit(dtype, processes=2) is None else 1
    device = default_device()
    with ThreadPoolExecutor(at_once) as pool:
        begun = [pool.submit(footprint, workload, dtype, each, device) for each in contenders]
        for contender, pending in zip(contenders, begun, strict=True):
            try:
                for what, value in pending.result().items():
                    writer.add(case, contender.name, what, 0, value)
            except FootprintError as error:
                writer.add(case, contender.name, "failed", 0, 0.0, f"memory: {error}")
            advance(f"{case.name}: memory")
