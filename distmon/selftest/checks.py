"""The checks of the self-test. Each returns what it found, or raises.

A check that needs something this machine lacks raises `NotHere` with one sentence.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distmon
from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.collect.telemetry.hardware import describe_devices
from distmon.device import DeviceMark, is_accelerator
from distmon.layout.capture import capture
from distmon.probe.backend import Backend, choose_probe
from distmon.probe.rows import Rows
from distmon.probe.torch_probe import TorchProbe
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading
from distmon.selftest.not_here import NotHere, is_simulated
from distmon.selftest.transports import RANK_PROGRAM, check_transport


def _model(device: torch.device, layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    stack: list[nn.Module] = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*stack).to(device)


@contextmanager
def _attached(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        given = {"interval": 2, "budget": None, "sinks": ["jsonl"], **options}
        given.setdefault("run_dir", Path(folder) / "run")
        with distmon.attach(model, optimizer, **given) as monitor:
            yield monitor


def train_small(
    device: torch.device, steps: int, around: Callable[[], Any] | None = None, **options: Any
) -> distmon.Record:
    """Train a small model; `around` makes a context for the monitor's own calls."""
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.ones(4, 64, device=device)
    with _attached(model, optimizer, **options) as monitor:
        for step in range(steps):
            loss = model(data).square().mean()
            loss.backward()
            monitor.check(loss=loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if around is None or step == 0:  # the first step agrees with the other ranks
                monitor.step(loss=loss.detach(), tokens=4)
            else:
                with around():
                    monitor.step(loss=loss.detach(), tokens=4)
            if is_accelerator(device):
                torch.accelerator.synchronize(device)
    record: distmon.Record | None = monitor.last_record
    assert record is not None, "there is no record"
    return record


def compared_metrics(device: torch.device, **options: Any) -> dict[str, float]:
    """Train a small model; return the metrics that must not depend on how ranks exchange them."""
    record = train_small(device, 5, **options)
    assert not record.faults, record.faults
    names = ("monitor/grad_norm", "monitor/update_ratio_median", "train/step_loss")
    return {name: record.metrics[name] for name in names}


def kernels(device: torch.device) -> str:
    """Compare the rows of the probe of this device with those of plain torch on the CPU."""
    found: list[Rows] = []
    used = ""
    # On a GPU Triton must work: with "auto" plain torch would take its place.
    backend: Backend = "triton" if device.type == "cuda" and not is_simulated(device) else "auto"
    for where in (torch.device("cpu"), device):
        model = _model(where)
        shards = capture(model)
        plan = build_plan(shards, Reading(whole_gradients=True), 0, where)
        probe = choose_probe(backend, plan, shards) if found else TorchProbe(plan, shards)
        used = type(probe).__name__
        rows = Rows(
            torch.zeros((len(shards), len(SUM_COLUMNS)), dtype=torch.float64, device=where),
            torch.zeros((len(shards), len(MAX_COLUMNS)), device=where),
            torch.zeros((len(shards), BINS), dtype=torch.float64, device=where),
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        probe.snapshot()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01)
        probe.measure(rows, torch.ones(len(shards), dtype=torch.float64, device=where))
        bins = None if rows.bins is None else rows.bins.cpu()
        found.append(Rows(rows.sums.cpu(), rows.maxima.cpu(), bins))
    expected, mine = found
    torch.testing.assert_close(mine.sums, expected.sums, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.maxima, expected.maxima, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.bins, expected.bins, rtol=0, atol=0)
    return f"{used}: all columns as plain torch on the CPU"


def records(device: torch.device) -> str:
    """Train with a monitor on the device and on the CPU; the records must be close."""
    here, host = train_small(device, 9), train_small(torch.device("cpu"), 9)
    names = ("monitor/update_ratio_median", "monitor/grad_norm", "train/step_loss")
    assert here.step == host.step, (here.step, host.step)
    for name in names:
        ours, theirs = here.metrics[name], host.metrics[name]
        # TF32 and other orders of addition are allowed to differ by this much.
        assert abs(ours - theirs) <= 1e-2 * abs(theirs), (name, ours, theirs)
    return f"step {here.step}: {', '.join(names)} within 1% of the CPU"


def waits(device: torch.device) -> str:
    """Let CUDA raise when `step()` waits for the device."""
    mode = getattr(torch._C, "_cuda_set_sync_debug_mode", None)
    if device.type != "cuda" or mode is None:
        raise NotHere("this device cannot report waits")

    @contextmanager
    def forbidden() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    record = train_small(device, 9, around=forbidden)
    assert not record.faults, record.faults
    return "no synchronizing call in step()"


def launches(device: torch.device) -> str:
    """Count the kernels of an observation with 10 and with 1000 parameters."""
    if device.type != "cuda" or is_simulated(device):
        raise NotHere("there is no GPU whose kernels the profiler could count")
    from torch.profiler import ProfilerActivity, profile

    counted = []
    for layers in (5, 500):
        model = _model(device, layers, 8)
        shards = capture(model)
        probe = choose_probe("auto", build_plan(shards, Reading(), 0, device), shards)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        probe.snapshot()
        torch.accelerator.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            probe.snapshot()
            torch.accelerator.synchronize(device)
        counted.append(sum(event.count for event in profiled.key_averages()))
    assert counted[0] == counted[1], counted
    return f"{counted[0]} for a snapshot of 10 and of 1000 parameters"


def graph_capture(device: torch.device) -> str:
    """Capture and replay a training step with a monitor attached."""
    if device.type != "cuda":
        raise NotHere("CUDA graphs need a CUDA device")
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    data = torch.ones(4, 64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    with _attached(model, optimizer, interval=1) as monitor:
        side = torch.Stream(device)
        side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            for _ in range(3):
                step()
                monitor.step()
        torch.accelerator.current_stream(device).wait_stream(side)
        torch.accelerator.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(4):
            monitor.before_step()
            graph.replay()
            monitor.after_step()
            monitor.step()
    record = monitor.last_record
    assert record is not None
    assert record.metrics["monitor/update_ratio_median"] > 0
    return "captured with hooks attached; updates of replays are measured"


def compiled_optimizer(device: torch.device) -> str:
    """Compile the optimizer step; the hooks must not recompile it."""
    from torch._dynamo.utils import counters

    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frames = []
    with _attached(model, optimizer) as monitor:
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(6):
            model(torch.ones(4, 64, device=device)).sum().backward()
            step()
            monitor.step()
            frames.append(counters["frames"]["ok"])
    assert frames[-1] == frames[1], frames
    return "no recompile after the second step"


def management_library(device: torch.device) -> str:
    """Read the device through NVML or amdsmi."""
    if device.type != "cuda":
        raise NotHere("no device with a management library")
    found = describe_devices()
    problems = [each.problem for each in found if each.problem]
    if problems:
        raise NotHere(problems[0])
    missing = sorted({field for each in found for field in each.missing})
    return f"{len(found)} devices; not reported: {', '.join(missing) or 'nothing'}"


def timings(device: torch.device) -> str:
    """Time an observation against a clone of all weights and a norm of each tensor."""
    if not is_accelerator(device) or is_simulated(device):
        raise NotHere("times of this device say nothing about a GPU")
    model = _model(device, 48, 2048)
    shards = capture(model)
    probe = choose_probe("auto", build_plan(shards, Reading(), 0, device), shards)
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    def naive() -> None:
        for p in model.parameters():
            p.detach().clone().norm()

    spent = []
    for work in (probe.snapshot, naive):
        work()
        torch.accelerator.synchronize(device)
        begin, host = DeviceMark(device, timing=True), time.perf_counter()
        for _ in range(10):
            work()
        asked, end = time.perf_counter() - host, DeviceMark(device, timing=True)
        end.wait()
        seconds = end.seconds_since(begin)
        spent.append((1e2 * asked, 0.0 if seconds is None else 1e2 * seconds))
    ours, theirs = (f"{a:.3f} ms host, {b:.3f} ms device" for a, b in spent)
    return f"snapshot {ours}; clone and norm {theirs}"


Check = tuple[str, Callable[[torch.device], str]]


def all_checks(rank_program: str = RANK_PROGRAM) -> tuple[Check, ...]:
    """Return name and function of every check; `rank_program` is that of the ranks."""

    def transport(name: str) -> Callable[[torch.device], str]:
        return lambda device: check_transport(
            name, device, rank_program, lambda: compared_metrics(device)
        )

    return (
        ("kernels against references", kernels),
        ("records against the CPU", records),
        ("waits in step()", waits),
        ("launches", launches),
        ("transport: host", transport("host")),
        ("transport: device", transport("device")),
        ("graph capture", graph_capture),
        ("compiled optimizer", compiled_optimizer),
        ("management library", management_library),
        ("timings", timings),
    )
