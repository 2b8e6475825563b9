"""One case from beginning to end: the race, and what else each contender needs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from distmon_benchmarks.contenders import Contender
from distmon_benchmarks.footprint import FootprintError, footprint
from distmon_benchmarks.interleaved import race
from distmon_benchmarks.results import ResultsWriter
from distmon_benchmarks.training import Training
from distmon_benchmarks.truth import FAR_ERRORS, Verdict
from distmon_benchmarks.workloads import Dtype, Workload

Advance = Callable[[str], None]
"""Called with what is done next, once for everything that `steps` counts."""


def steps(contenders: Sequence[Contender], rounds: int, footprints: bool) -> int:
    """How often `measure` calls `advance`."""
    return rounds + 2 + (len(contenders) if footprints else 0)


def measure(
    workload: Workload,
    dtype: Dtype,
    contenders: Sequence[Contender],
    writer: ResultsWriter,
    *,
    rounds: int,
    limit_s: float,
    footprints: bool,
    device: torch.device,
    advance: Advance = lambda _: None,
    race_limit_s: float = math.inf,
) -> None:
    """Write everything about one workload in one dtype; `none` has to be among the contenders.

    What is skipped or wrong goes into the writer's context.
    """
    name = f"{workload.name} {dtype}"
    if reason := workload.does_not_fit(dtype):
        writer.context.skipped_workloads[name] = reason
        return
    contenders = available(contenders, writer)
    writer.context.conditions[workload.name] = workload.conditions
    training = Training.begin(workload, dtype, device)
    case = training.case(workload, dtype)
    with tempfile.TemporaryDirectory() as folder:
        lanes = race(
            training,
            contenders,
            Path(folder),
            rounds,
            limit_s,
            lambda: advance(f"{name}: times"),
            race_limit_s,
        )
    del training  # the processes below need the memory
    for lane in lanes:
        if lane.wrong is not None:
            writer.context.found_wrong(lane.contender.name, name, lane.wrong)
            continue
        if remarks := [*_remarks(lane.verdict)]:
            writer.context.conditions[f"{lane.contender.name} on {name}"] = "; ".join(remarks)
        for found in lane.findings:
            writer.add(case, lane.contender.name, found.measure, found.round, found.value)
    if not footprints:
        return
    # Nothing is timed here, so two go at once where there is room for both.
    at_once = 2 if workload.does_not_fit(dtype, processes=2) is None else 1
    right = [lane.contender.name for lane in lanes if lane.wrong is None]
    with ThreadPoolExecutor(at_once) as pool:
        begun = {who: pool.submit(footprint, workload, dtype, who, device) for who in right}
        for lane in lanes:
            who = lane.contender.name
            try:
                needed = begun[who].result() if who in begun else {}
            except FootprintError as error:
                writer.context.found_wrong(who, f"memory of {name}", str(error))
                needed = {}
            for what, value in needed.items():
                writer.add(case, who, what, 0, value)
            advance(f"{name}: memory")


def _remarks(verdict: Verdict | None) -> Iterator[str]:
    """What a reader has to know about an answer that counts as right."""
    if verdict is not None and verdict.far_off:
        yield (
            f"{verdict.far_off} of {verdict.judged} sampled norms are more than {FAR_ERRORS:g} "
            "standard errors off"
        )
    if verdict is not None and verdict.not_judged:
        yield (
            f"not judged: {', '.join(verdict.not_judged)}; nearly all of it lies in so few rows "
            "that a sample may miss them, and its standard error does not tell"
        )


def available(contenders: Sequence[Contender], writer: ResultsWriter) -> list[Contender]:
    """Those that can run here; of the others the context says why not."""
    found = []
    for contender in contenders:
        writer.context.descriptions[contender.name] = contender.description
        if reason := contender.unavailable():
            writer.context.skipped[contender.name] = reason
        else:
            found.append(contender)
    return found
