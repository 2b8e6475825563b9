"""What the Triton kernels cost: resources per architecture, bytes moved, host time, launches.

    python benchmarks/kernels.py            # everything; compiles for about a minute
    python benchmarks/kernels.py --quick    # host time and launches only

Without a GPU no GPU time is printed: resources are read from the compiled binaries and the
roofline line is labelled as an estimate. On a machine with CUDA the same command also measures.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
import triton
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from csrc_triton import sampled_stats, snapshot
from csrc_triton.address_layout import ADDRESS_COLUMNS
from csrc_triton.compile_report import TARGETS, Resources, compile_all
from csrc_triton.row_layout import BINS, MAX_COLUMNS, RUN, SUM_COLUMNS
from distmon import native
from distmon.layout import Shard as LayoutShard
from distmon.layout.dtensor import dtensor_shard
from distmon.layout.plain import plain_shard
from distmon.probe import Rows
from distmon.probe.triton_probe import TritonProbe
from distmon.sampling import build_plan

# Registers and threads of one SM (CUDA), or VGPRs per lane and waves of one SIMD (gfx942).
THREADS_PER_SM = 2048
REGISTERS_PER_SM = 65536
BANDWIDTH = {"sm_80": 2.0e12, "sm_90": 3.35e12, "sm_100": 8.0e12, "gfx942": 5.3e12}
"""Bytes per second of HBM as the vendors state them: A100 80GB, H100 SXM, B200, MI300X."""


def occupancy(r: Resources) -> float:
    """Share of the resident threads that registers allow."""
    if r.target == "gfx942":
        return min(8, 512 // max(8, -(-r.registers // 8) * 8)) / 8
    per_warp = -(-r.registers * 32 // 256) * 256
    blocks = REGISTERS_PER_SM // (per_warp * r.warps)
    return min(blocks * r.warps * 32, THREADS_PER_SM) / THREADS_PER_SM


def resource_table() -> None:
    print(
        f"\n{'kernel':14}{'configuration':24}{'target':8}{'regs':>5}{'spill':>6}{'shared':>7}"
        f"{'occup.':>7}{'instr':>7}  loads by bits / stores by bits / instructions by class"
    )
    for r in compile_all(tuple(TARGETS)):
        widths = " ".join(f"{k}:{v}" for k, v in sorted(r.loads.items(), key=lambda x: -int(x[0])))
        stores = " ".join(f"{k}:{v}" for k, v in sorted(r.stores.items(), key=lambda x: -int(x[0])))
        classes = " ".join(f"{k} {v}" for k, v in sorted(r.classes.items(), key=lambda x: -x[1]))
        print(
            f"{r.kernel:14}{r.configuration:24}{r.target:8}{r.registers:5}{r.spills:6}"
            f"{r.shared_bytes:7}{occupancy(r):7.0%}{r.instructions:7}  "
            f"{widths} / {stores} / {classes}",
            flush=True,
        )


def bytes_table(sample: int = 1024) -> None:
    """Bytes of one observation (snapshot and statistics) per parameter, against the least possible.

    The least: 32-byte sectors of the sampled weights before and after and of the gradients, and the
    row that is written. The rest is offsets, the kept samples and the tables.
    """
    print("\nbytes per parameter and observation, sample 1024, bins on")
    row = 8 * len(SUM_COLUMNS) + 4 * len(MAX_COLUMNS) + 8 * BINS + 8
    tables = 2 * (8 * len(ADDRESS_COLUMNS) + 8 + 4 + 32) + 8 + 8
    for name, size in (("fp32", 4), ("bf16", 2)):
        sectors = sample // RUN * -(-RUN * size // 32) * 32
        least = 3 * sectors + row
        moved = least + 2 * 4 * sample + 2 * 4 * sample + tables
        print(f"  {name}: least {least:6}  moved {moved:6}  factor {moved / least:.2f}")
        for target, bandwidth in BANDWIDTH.items():
            least_us = 1000 * moved / bandwidth * 1e6
            print(
                f"    estimate, not measured: 1000 parameters on {target} at the stated "
                f"{bandwidth / 1e12:.2f} TB/s take at least {least_us:.1f} us"
            )


class StubbedLaunch:
    """Stands for a kernel: everything around the launch runs, the launch is only counted."""

    def __init__(self, counted: Counter[str], name: str) -> None:
        self.counted, self.name = counted, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: object, **__: object) -> None:
            self.counted[self.name] += 1

        return launch


def plain_parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(64))


def sharded_parameter() -> torch.nn.Parameter:
    """As `fully_shard` makes them: a DTensor of which this rank holds one piece."""
    mesh = init_device_mesh("cpu", (2,))
    return torch.nn.Parameter(DTensor.from_local(torch.randn(64), mesh, [Shard(0)]))


def sharded_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    spec = parameter._spec  # type: ignore[attr-defined]
    return DTensor(torch.zeros(64), spec, requires_grad=False)  # type: ignore[abstract]


def make_rows(count: int, device: torch.device) -> Rows:
    return Rows(
        torch.zeros((count, len(SUM_COLUMNS)), dtype=torch.float64, device=device),
        torch.zeros((count, len(MAX_COLUMNS)), device=device),
        torch.zeros((count, BINS), dtype=torch.float64, device=device),
    )


def host_time() -> None:
    """Host time of snapshot and measure with stubbed launches; every gradient moves every time."""
    counted: Counter[str] = Counter()
    real = snapshot.snapshot_kernel, sampled_stats.sampled_stats_kernel
    snapshot.snapshot_kernel = StubbedLaunch(counted, "snapshot")
    sampled_stats.sampled_stats_kernel = StubbedLaunch(counted, "statistics")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found = native.status()
    ways: dict[str, native.NativeModule | None] = {"Python": None}
    if found.module is None:
        print(f"\nthe native module is not used: {found.reason}")
    else:
        ways["native"] = found.module
    print(
        "\nhost time of an observation, launches stubbed, all gradients new (median, least of 30)"
    )
    try:
        for count, target in ((10, None), (1000, 0.5), (10_000, 5.0)):
            parameters = [plain_parameter() for _ in range(count)]
            shards = [plain_shard(f"p{i}", p) for i, p in enumerate(parameters)]
            case = HostCase("plain", parameters, shards, lambda _: torch.zeros(64), target)
            for way, module in ways.items():
                time_host(case, way, module, counted)
        parameters = [sharded_parameter() for _ in range(1000)]
        shards = [dtensor_shard(f"p{i}", p, True) for i, p in enumerate(parameters)]  # type: ignore[arg-type]
        case = HostCase("fully_shard", parameters, shards, sharded_gradient, 1.0)
        for way, module in ways.items():
            time_host(case, way, module, counted)
    finally:
        snapshot.snapshot_kernel, sampled_stats.sampled_stats_kernel = real
        dist.destroy_process_group()


@dataclass(frozen=True)
class HostCase:
    """Parameters of one kind, and what their host time should be."""

    kind: str
    parameters: list[torch.nn.Parameter]
    shards: list[LayoutShard]
    gradient: Callable[[torch.nn.Parameter], torch.Tensor]
    goal_ms: float | None


def time_host(
    case: HostCase, way: str, module: native.NativeModule | None, counted: Counter[str]
) -> None:
    """Print one line."""
    device, count = torch.device("cpu"), len(case.parameters)
    probe = TritonProbe(build_plan(case.shards, 64, 0, device), case.shards, native=module)
    rows, applied = make_rows(count, device), torch.ones(count, dtype=torch.float64)
    times: dict[str, list[float]] = {"snapshot": [], "measure": []}
    counted.clear()
    for _ in range(30):
        for p in case.parameters:
            p.grad = case.gradient(p)
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
    per = ", ".join(f"{v / 30:.0f} {k}" for k, v in counted.items())
    print(
        f"  {count:6} parameters, {case.kind:11} by {way}: {statistics.median(both):6.2f} ms, "
        f"least {min(both):.2f} ({parts}){goal}; launches {per}"
    )


def fused_norms(grads: list[torch.Tensor]) -> dict[str, Callable[[], object] | str]:
    """Per-tensor norms in one launch as other packages do it, or why they are not compared."""
    contenders: dict[str, Callable[[], object] | str] = {}
    overflow = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
    for package, operators, applier in (
        ("apex", "amp_C", "apex.multi_tensor_apply"),
        ("TransformerEngine", "transformer_engine_torch", "transformer_engine.pytorch.optimizers"),
    ):
        name = f"{package} multi_tensor_l2norm"
        try:
            norm = import_module(operators).multi_tensor_l2norm
            apply = import_module(applier).multi_tensor_applier
            contenders[name] = partial(apply, norm, overflow, [grads], True)
        except (ImportError, AttributeError) as error:
            contenders[name] = f"skipped: {error}"
    return contenders


def gpu_times() -> None:
    """Measured only where there is a GPU: the sampled observation against the alternatives."""
    if not torch.cuda.is_available():
        print("\nno GPU here: no GPU time was measured and none is printed")
        return
    device = torch.device("cuda")
    parameters = [torch.nn.Parameter(torch.randn(1 << 20, device=device)) for _ in range(200)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    shards = [plain_shard(f"p{i}", p) for i, p in enumerate(parameters)]
    plan = build_plan(shards, 1024, 0, device)
    rows = make_rows(len(shards), device)
    applied = torch.ones(len(shards), dtype=torch.float64, device=device)
    sampled, exact = TritonProbe(plan, shards), TritonProbe(plan, shards, exact=True)
    grads = [p.grad for p in parameters]
    print(f"\nmeasured on {torch.cuda.get_device_name()}: 200 parameters of 2**20 fp32")
    contenders: dict[str, Callable[[], object] | str] = {
        "snapshot launch": sampled.snapshot,
        "statistics launch": lambda: sampled.measure(rows, applied),
        "exact": lambda: exact.measure(rows, applied),
        "torch._foreach_norm of gradients": lambda: torch._foreach_norm(grads),
        "naive clone of weights": lambda: [p.detach().clone() for p in parameters],
        **fused_norms(grads),
    }
    for name, call in contenders.items():
        if isinstance(call, str):
            print(f"  {name:36} {call}")
            continue
        milliseconds = triton.testing.do_bench(call, quantiles=[0.2, 0.5, 0.8])
        print(f"  {name:36} p20/p50/p80 {' / '.join(f'{t:.3f}' for t in milliseconds)} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="skip the compilation")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, triton {triton.__version__}, {platform.machine()}, "
        f"Python {platform.python_version()}"
    )
    if not arguments.quick:
        resource_table()
    bytes_table()
    host_time()
    gpu_times()
