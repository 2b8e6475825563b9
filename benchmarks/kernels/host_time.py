"""Host time and launches of an observation on the Triton path, with stubbed launches."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from csrc_triton import sampled_stats, snapshot
from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon import native
from distmon.layout import Shard as LayoutShard
from distmon.layout.dtensor import dtensor_shard
from distmon.layout.plain import plain_shard
from distmon.probe import Rows
from distmon.probe.triton_probe import TritonProbe
from distmon.sampling.plan import build_plan

REPEATS = 30


class StubbedLaunch:
    """Stands for a kernel: everything around the launch runs, the launch is only counted."""

    def __init__(self, counted: Counter[str], name: str) -> None:
        self.counted, self.name = counted, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: object, **__: object) -> None:
            self.counted[self.name] += 1

        return launch


def plain_parameters(count: int) -> tuple[list[torch.nn.Parameter], list[LayoutShard]]:
    """Return parameters and their shards, on one rank."""
    parameters = [torch.nn.Parameter(torch.randn(64)) for _ in range(count)]
    return parameters, [plain_shard(f"p{i}", p) for i, p in enumerate(parameters)]


def sharded_parameters(count: int) -> tuple[list[torch.nn.Parameter], list[LayoutShard]]:
    """Return parameters as `fully_shard` makes them: DTensors of which this rank holds a shard."""
    mesh = init_device_mesh("cpu", (2,))
    local = [DTensor.from_local(torch.randn(64), mesh, [Shard(0)]) for _ in range(count)]
    parameters = [torch.nn.Parameter(each) for each in local]
    shards = [dtensor_shard(f"p{i}", p, True) for i, p in enumerate(parameters)]  # type: ignore[arg-type]
    return parameters, shards


def make_rows(count: int, device: torch.device) -> Rows:
    return Rows(
        torch.zeros((count, len(SUM_COLUMNS)), dtype=torch.float64, device=device),
        torch.zeros((count, len(MAX_COLUMNS)), device=device),
        torch.zeros((count, BINS), dtype=torch.float64, device=device),
    )


@dataclass(frozen=True)
class HostCase:
    """Parameters of one kind, and what their host time should be."""

    kind: str
    parameters: list[torch.nn.Parameter]
    shards: list[LayoutShard]
    goal_ms: float | None


def host_cases() -> Iterator[HostCase]:
    """Yield what is timed; a process group must exist."""
    for count, goal in ((10, None), (1000, 0.5), (10_000, 5.0)):
        yield HostCase("plain", *plain_parameters(count), goal)
    yield HostCase("fully_shard", *sharded_parameters(1000), 1.0)


@contextmanager
def stubbed_launches() -> Iterator[Counter[str]]:
    """Replace the kernels by stubs and count their launches."""
    counted: Counter[str] = Counter()
    with (
        mock.patch.object(snapshot, "snapshot_kernel", StubbedLaunch(counted, "snapshot")),
        mock.patch.object(
            sampled_stats, "sampled_stats_kernel", StubbedLaunch(counted, "statistics")
        ),
    ):
        yield counted


def host_time() -> None:
    """Print the host time of snapshot and measure; all gradients are new at every observation."""
    found = native.status()
    ways: dict[str, native.NativeModule | None] = {"Python": None}
    if found.module is None:
        print(f"\nthe native module is not used: {found.reason}")
    else:
        ways["native"] = found.module
    print(
        f"\nhost time of an observation, launches stubbed, all gradients new (median and least of "
        f"{REPEATS})"
    )
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with stubbed_launches() as counted:
            for case in host_cases():
                for way, module in ways.items():
                    time_host(case, way, module, counted)
    finally:
        dist.destroy_process_group()


def time_host(
    case: HostCase, way: str, module: native.NativeModule | None, counted: Counter[str]
) -> None:
    """Print one line."""
    device, count = torch.device("cpu"), len(case.parameters)
    probe = TritonProbe(build_plan(case.shards, 64, 0, device), case.shards, native=module)
    rows, applied = make_rows(count, device), torch.ones(count, dtype=torch.float64)
    times: dict[str, list[float]] = {"snapshot": [], "measure": []}
    counted.clear()
    for _ in range(REPEATS):
        for p in case.parameters:
            p.grad = torch.zeros_like(p)
        for name, call in (
            ("snapshot", probe.snapshot),
            ("measure", lambda: probe.measure(rows, applied)),
        ):
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    both = [a + b for a, b in zip(times["snapshot"], times["measure"], strict=True)]
    parts = ", ".join(f"{k} {statistics.median(v):.2f}" for k, v in times.items())
    goal = "" if case.goal_ms is None else f"; goal {case.goal_ms} ms"
    per = ", ".join(f"{v / REPEATS:.0f} {k}" for k, v in counted.items())
    print(
        f"  {count:6} parameters, {case.kind:11} by {way}: {statistics.median(both):6.2f} ms, "
        f"least {min(both):.2f} ({parts}){goal}; launches {per}"
    )
