"""What planning costs a rank of a very large job: time, memory, and bytes per observation.

    python -m benchmarks.scale planning            # up to 100 000 tensors and 4096 ranks
    python -m benchmarks.scale planning --quick    # Llama-7B-shaped only

Models are on the meta device and the process group is torch's fake one, so that one process plays
one rank of any world; nothing is trained. Every configuration runs in a process of its own. Times
are of the processor: other load on the machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from distmon.layout import capture
from distmon.record.sample_tables import Sampling
from distmon.reduce.reduced_view import BufferSizes
from distmon.runtime.row_measurement import MOST_HISTOGRAMS
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading

WORLDS: Final = (8, 64, 512, 4096)
TENSOR_PARALLEL: Final = 8
REPLICAS: Final = 2
INTERVAL: Final = 100
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def llama(blocks: int, width: int, inner: int, keys: int, vocabulary: int) -> Shapes:
    """Yield names and shapes of a Llama; `keys` is the width of keys and values."""
    yield "embed.weight", (vocabulary, width)
    for i in range(blocks):
        for name, rows, columns in (
            ("q", width, width),
            ("k", keys, width),
            ("v", keys, width),
            ("o", width, width),
            ("gate", inner, width),
            ("up", inner, width),
            ("down", width, inner),
        ):
            yield f"blocks.{i}.{name}.weight", (rows, columns)
        yield f"blocks.{i}.norm1.weight", (width,)
        yield f"blocks.{i}.norm2.weight", (width,)
    yield "norm.weight", (width,)
    yield "head.weight", (vocabulary, width)


def mixture(blocks: int, experts: int, width: int, inner: int, vocabulary: int) -> Shapes:
    """Yield names and shapes of a mixture of experts whose experts are tensors of their own."""
    yield "embed.weight", (vocabulary, width)
    for i in range(blocks):
        yield f"blocks.{i}.router.weight", (experts, width)
        for k in range(experts):
            for name, shape in (
                ("gate", (inner, width)),
                ("up", (inner, width)),
                ("down", (width, inner)),
            ):
                yield f"blocks.{i}.experts.{k}.{name}.weight", shape
    yield "head.weight", (vocabulary, width)


def shapes_of(model: str) -> Shapes:
    """Return the shapes of one of the models."""
    if model == "llama-7b":
        return llama(32, 4096, 11008, 4096, 32000)
    if model == "llama-405b":
        return llama(126, 16384, 53248, 1024, 128256)
    return mixture(65, 512, 1024, 512, 50304)


def build(model: str, parallelism: str, world: int) -> nn.Module:
    """Return a model of sharded parameters on the meta device.

    Made of DTensors directly: `fully_shard` takes minutes for 100 000 parameters.
    """
    if parallelism == "fsdp":
        mesh, placements = init_device_mesh("cpu", (world,)), [Shard(0)]
    elif parallelism == "hsdp":
        mesh = init_device_mesh("cpu", (REPLICAS, world // REPLICAS))
        placements = [Replicate(), Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (world // TENSOR_PARALLEL, TENSOR_PARALLEL))
        placements = [Shard(0), Shard(1)]
    made: dict[tuple[int, ...], Any] = {}
    root = nn.Module()
    for name, shape in shapes_of(model):
        if shape not in made:
            made[shape] = _sharded(shape, mesh, placements)
        local, spec = made[shape]
        *path, own = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(own, nn.Parameter(DTensor(local, spec, requires_grad=False)))  # type: ignore[call-arg]
    return root


def _sharded(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[torch.Tensor, Any]:
    """Return a local tensor and the spec of a parameter."""
    where = [
        Replicate() if isinstance(each, Shard) and each.dim >= len(shape) else each
        for each in placements
    ]
    size, _ = compute_local_shape_and_global_offset(shape, mesh, where)
    local = torch.empty(size, device="meta")
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(
        local, mesh, where, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return local, made._spec


@dataclass(frozen=True)
class Cost:
    """What planning costs one rank."""

    tensors: int
    sampled_here: int
    capture_seconds: float
    plan_seconds: float
    plan_bytes: int
    grown_bytes: int
    """Growth of the process's largest resident memory while capturing and planning."""
    sent_bytes: int
    has_bins: bool


def measure(model: str, parallelism: str, world: int, rank: int) -> Cost:
    """Play `rank` of `world`: shard, capture, plan."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    net = build(model, parallelism, world)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.disable()  # as attach does
    start = time.process_time()
    shards = capture(net)
    captured = time.process_time()
    plan = build_plan(shards, Reading(), 0, torch.device("cpu"))
    Sampling.describe(plan, [len(s.global_shape) for s in shards], [True] * len(shards))
    end = time.process_time()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = plan.bin_words(1) if len(shards) <= MOST_HISTOGRAMS else 0
    return Cost(
        tensors=len(shards),
        sampled_here=int(sum(int(c.group_counts.sum()) for c in plan.chunks)),
        capture_seconds=captured - start,
        plan_seconds=end - captured,
        plan_bytes=plan.nbytes,
        grown_bytes=(after - before) * 1024,
        sent_bytes=BufferSizes(len(shards), world, words, INTERVAL).nbytes,
        has_bins=words > 0,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per configuration."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale planning", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="Llama-7B-shaped only")
    options = parser.parse_args(arguments)
    cases = [*itertools.product(["llama-7b"], ["fsdp", "hsdp", "fsdp+tp"], WORLDS)]
    if not options.quick:
        cases += [("llama-405b", "fsdp", 4096), ("llama-405b", "fsdp+tp", 4096)]
        cases += [("moe-100k", "fsdp", 512), ("moe-100k", "fsdp", 4096)]
    print(f"torch {torch.__version__}, one rank of a fake world, gradients sampled")
    print(
        f"{'model':10} {'sharding':8} {'ranks':>5} {'tensors':>8} {'sampled':>8} {'capture':>9} "
        f"{'plan':>8} {'tables':>9} {'memory':>8} {'sent':>9} {'per parameter':>14}"
    )
    context = multiprocessing.get_context("spawn")
    for model, parallelism, world in cases:
        with context.Pool(1) as pool:
            cost = pool.apply(measure, (model, parallelism, world, world - world // 3))
        each = cost.sent_bytes / cost.tensors
        print(
            f"{model:10} {parallelism:8} {world:5} {cost.tensors:8} {cost.sampled_here:8} "
            f"{cost.capture_seconds:7.2f} s {cost.plan_seconds:6.2f} s "
            f"{cost.plan_bytes / 1e6:6.2f} MB {cost.grown_bytes / 1e6:5.0f} MB "
            f"{cost.sent_bytes / 1e6:6.2f} MB {each:10.0f} B  "
            f"{'' if cost.has_bins else 'no percentiles'}",
            flush=True,
        )
