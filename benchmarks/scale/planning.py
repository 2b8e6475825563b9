"""What planning costs a rank of a very large job: time, memory, and bytes per observation.

    python -m benchmarks.scale planning            # Llama-7B-shaped and a 100 000-tensor MoE
    python -m benchmarks.scale planning --quick    # Llama-7B-shaped only

Models are on the meta device and the process group is torch's fake one, so that one process plays
one rank of any world; nothing is trained. Every configuration runs in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.layout import capture
from distmon.layout.parameter_table import describe
from distmon.reduce.rank_slots import SLOT_SIZE
from distmon.sampling.plan import build_plan

WORLDS = (8, 64, 512, 4096)
TENSOR_PARALLEL = 8
REPLICAS = 2


class LlamaBlock(nn.Module):
    """The parameters of one block of a 7B Llama; it is never run."""

    def __init__(self, width: int = 4096, inner: int = 11008) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(width, width, bias=False))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)


class MoeBlock(nn.Module):
    """The parameters of one block with many small experts; it is never run."""

    def __init__(self, width: int = 1024, inner: int = 512, experts: int = 512) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {
                    "gate": nn.Linear(width, inner, bias=False),
                    "up": nn.Linear(width, inner, bias=False),
                    "down": nn.Linear(inner, width, bias=False),
                }
            )
            for _ in range(experts)
        )


class Model(nn.Module):
    """Embedding, blocks, norm and head; it is never run."""

    def __init__(self, blocks: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)


def build(model: str) -> Model:
    """Return a model on the meta device."""
    with torch.device("meta"):
        if model == "llama-7b":
            return Model([LlamaBlock() for _ in range(32)], 4096, 32000)
        return Model([MoeBlock() for _ in range(65)], 1024, 50304)


def distribute(model: Model, parallelism: str, world: int) -> None:
    """Shard `model` in place over a fake world."""
    if parallelism == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    elif parallelism == "hsdp":
        mesh = init_device_mesh(
            "cpu", (REPLICAS, world // REPLICAS), mesh_dim_names=("replica", "shard")
        )
    else:
        whole = init_device_mesh(
            "cpu", (world // TENSOR_PARALLEL, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp")
        )
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = dict.fromkeys(("q", "k", "v", "gate", "up"), columns)
        for block in model.blocks:
            parallelize_module(block, whole["tp"], {**plan, "o": rows, "down": rows})
        mesh = whole["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class Cost:
    """What planning costs one rank."""

    tensors: int
    parameters: int
    sampled_here: int
    capture_seconds: float
    plan_seconds: float
    plan_bytes: int
    grown_bytes: int
    """Growth of the process's largest resident memory while capturing and planning."""
    sent_bytes: int
    sent_without_bins: int


def measure(model: str, parallelism: str, world: int, rank: int) -> Cost:
    """Play `rank` of `world`: shard, capture, plan."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    net = build(model)
    distribute(net, parallelism, world)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    shards = capture(net)
    captured = time.perf_counter()
    describe(shards)
    plan = build_plan(shards, 1024, 0, torch.device("cpu"))
    end = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = len(shards) * (8 * len(SUM_COLUMNS) + 4 * len(MAX_COLUMNS)) + world * SLOT_SIZE * 8
    return Cost(
        tensors=len(shards),
        parameters=sum(s.numel for s in shards),
        sampled_here=int(sum(int(c.group_counts.sum()) for c in plan.chunks)),
        capture_seconds=captured - start,
        plan_seconds=end - captured,
        plan_bytes=plan.nbytes,
        grown_bytes=(after - before) * 1024,
        sent_bytes=rows + len(shards) * BINS * 8,
        sent_without_bins=rows,
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
        cases += [("moe-100k", "fsdp", 512), ("moe-100k", "fsdp", 4096)]
    print(f"torch {torch.__version__}, one rank of a fake world, sample 1024")
    print(
        f"{'model':9} {'sharding':8} {'ranks':>5} {'tensors':>8} {'sampled':>8} {'capture':>9} "
        f"{'plan':>8} {'tables':>9} {'memory':>8} {'sent':>9} {'no bins':>9}"
    )
    context = multiprocessing.get_context("spawn")
    for model, parallelism, world in cases:
        with context.Pool(1) as pool:
            cost = pool.apply(measure, (model, parallelism, world, world - world // 3))
        print(
            f"{model:9} {parallelism:8} {world:5} {cost.tensors:8} {cost.sampled_here:8} "
            f"{cost.capture_seconds:7.2f} s {cost.plan_seconds:6.2f} s "
            f"{cost.plan_bytes / 1e6:6.2f} MB {cost.grown_bytes / 1e6:5.0f} MB "
            f"{cost.sent_bytes / 1e6:6.2f} MB {cost.sent_without_bins / 1e6:6.2f} MB",
            flush=True,
        )
