"""How far a sampled observation is from the least that reading its elements takes.

    python -m benchmarks.overhead.reading_limit [--workload gpt2] [--rounds 10]

A loop in C that only adds up the elements of the sample, with prefetching, takes turns with the
monitor in real steps: samples of the weights before the optimizer step; after it those of weights
and gradients. Both find the caches as the step leaves them.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.overhead.workloads import WORKLOADS
from csrc_triton.row_layout import GROUPS, RUN
from distmon.bench.contender import Session
from distmon.bench.contenders import SAMPLED
from distmon.bench.contenders.distmon_monitor import DistmonSession
from distmon.bench.training import Training
from distmon.monitor import Monitor
from distmon.probe.plan_rows import offsets_by_parameter, rows_by_parameter
from distmon.sampling.plan import SamplePlan, build_plan

LOOP = """
#include <stdint.h>
float read_runs(const int64_t* runs, const uint8_t* lengths, int64_t count) {
  float totals[8] = {0};
  for (int64_t i = 0; i < count; ++i) {
    if (i + 32 < count) __builtin_prefetch((const void*)runs[i + 32]);
    const float* x = (const float*)runs[i];
    if (lengths[i] == 8) {
      for (int k = 0; k < 8; ++k) totals[k] += x[k];
    } else {
      for (int64_t k = 0; k < lengths[i]; ++k) totals[0] += x[k];
    }
  }
  float total = 0;
  for (int k = 0; k < 8; ++k) total += totals[k];
  return total;
}
"""
Runs = tuple[NDArray[np.int64], NDArray[np.uint8]]
"""Offset of the first element of each run in bytes, and how many elements it has."""


class ReadingLoop(Session):
    """Reads what the sample of a plan has, and times only that."""

    def __init__(self, plan: SamplePlan, parameters: list[torch.Tensor], folder: Path) -> None:
        self._parameters = parameters
        self.weights = _sample_runs(plan, len(parameters))
        self._gradients = _gradient_runs(plan, [p.numel() for p in parameters])
        self._read = _compiled(folder)
        self.seconds = 0.0
        self.runs = 2 * sum(len(r[0]) for r in self.weights) + sum(
            len(r[0]) for r in (*self.weights, *self._gradients)
        )

    def before_step(self) -> None:
        self.seconds = 0.0
        self._time(self._at(self.weights, lambda p: p))

    def after_step(self, loss: torch.Tensor) -> None:  # noqa: ARG002 (named by the base class)
        weights = self._at(self.weights, lambda p: p)
        sampled = self._at(self.weights, lambda p: p.grad)
        gradients = self._at(self._gradients, lambda p: p.grad)
        for runs in (weights, sampled, gradients):
            self._time(runs)

    def _at(
        self, rows: list[Runs], tensor_of: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Runs:
        starts = []
        for (offsets, _), parameter in zip(rows, self._parameters, strict=True):
            tensor = tensor_of(parameter)
            assert tensor is not None, "every parameter of the workload has a gradient"
            starts.append(tensor.data_ptr() + offsets)
        return np.concatenate(starts), np.concatenate([lengths for _, lengths in rows])

    def _time(self, runs: Runs) -> None:
        addresses, lengths = (each.ctypes.data for each in runs)
        begin = time.perf_counter()
        self._read(addresses, lengths, len(runs[0]))
        self.seconds += time.perf_counter() - begin


def _compiled(folder: Path) -> Callable[[int, int, int], float]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("a C compiler is needed to compile the loop")
    source, library = folder / "loop.c", folder / "loop.so"
    source.write_text(LOOP)
    # Not -ffast-math: a library that is linked with it makes this process flush denormal numbers.
    sums = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]
    options = ["-O3", "-march=native", *sums, "-shared", "-fPIC"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    read = ctypes.CDLL(str(library)).read_runs
    read.argtypes = [ctypes.c_int64] * 3
    read.restype = ctypes.c_float
    return read


def plan_of(monitor: Monitor) -> SamplePlan:
    """Return the plan of a monitor again, with the offsets that its reader has freed."""
    observer = monitor.cycle.observer
    rows = observer.rows
    return build_plan(rows.shards, rows.plan.reading, observer.config.seed, rows.device)


def _sample_runs(plan: SamplePlan, parameters: int) -> list[Runs]:
    """Return the runs of the sample of each weight, which is that of its update."""
    rows, slots_of = rows_by_parameter(plan, parameters), offsets_by_parameter(plan, parameters)
    found = []
    for offsets, counts in zip(slots_of, rows.group_counts.tolist(), strict=True):
        assert offsets is not None
        groups = offsets.view(GROUPS, -1).numpy().astype(np.int64)
        used = [slots[:count] for slots, count in zip(groups, counts, strict=True)]
        found.append(_in_runs(np.concatenate(used)))
    return found


def _gradient_runs(plan: SamplePlan, numels: list[int]) -> list[Runs]:
    """Return the runs of the larger sample of each gradient; vectors are read whole."""
    runs, whole = plan.gradient_runs, set(plan.whole_gradients)
    offsets, lengths = runs.offsets.numpy().astype(np.int64), runs.lengths.numpy().astype(np.uint8)
    cut = [slice(runs.first[i], runs.first[i + 1]) for i in range(len(numels))]
    return [
        _in_runs(np.arange(numel)) if i in whole else (4 * offsets[cut[i]], lengths[cut[i]])
        for i, numel in enumerate(numels)
    ]


def _in_runs(elements: NDArray[np.int64]) -> Runs:
    """Put neighbors together, up to the length of a run."""
    new = np.flatnonzero(np.diff(elements, prepend=-2) != 1)
    ends = np.append(new[1:], len(elements))
    firsts = np.concatenate([np.arange(a, b, RUN) for a, b in zip(new, ends, strict=True)])
    lengths = np.diff(np.append(firsts, len(elements)))
    return 4 * elements[firsts], lengths.astype(np.uint8)


def main() -> None:
    """Print both, in milliseconds, and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default="gpt2", choices=[w.name for w in WORKLOADS])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    (workload,) = [w for w in WORKLOADS if w.name == options.workload]
    training = Training.begin(workload, "fp32", torch.device("cpu"))
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        monitor = SAMPLED.attach(training.model, training.optimizer, folder)
        assert isinstance(monitor, DistmonSession)
        loop = ReadingLoop(plan_of(monitor.monitor), [*training.model.parameters()], folder)
        for number in range(-1, options.rounds):
            times = training.step(monitor)
            monitor.settle()
            training.step(loop)
            if number >= 0:
                seconds["distmon, calls"].append(times.calls)
                seconds["distmon, calls and hooks"].append(times.calls + times.hooks)
                seconds["the loop"].append(loop.seconds)
        monitor.detach()
    print(f"{loop.runs} runs of up to {RUN} elements, median of {options.rounds} rounds")
    least = statistics.median(seconds["the loop"])
    for part, values in seconds.items():
        low, middle, high = np.quantile(values, (0.2, 0.5, 0.8)) * 1e3
        print(f"{part:26} {middle:6.2f} ms ({low:.2f} to {high:.2f})  {middle / least / 1e3:.2f}x")


if __name__ == "__main__":
    main()
