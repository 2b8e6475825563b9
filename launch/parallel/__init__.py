"""Each parallelism; `base.Parallelism` is what the training loop calls of them, and is DDP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch.parallel.base import Parallelism

PARALLELISMS = {
    "ddp": ("base.Parallelism", "every rank holds the model"),
    "fsdp": ("fsdp.FullySharded", "FSDP2: every parameter in as many shards as ranks"),
    "fsdp1": ("fsdp.FlatSharded", "the same with FullyShardedDataParallel"),
    "hsdp": ("fsdp.HybridSharded", "FSDP2 in 2 replicas; an even number of ranks from 4 on"),
    "tp": ("tp.TensorParallel", "every layer split over all ranks"),
    "fsdp+tp": ("fsdp.ShardedTensorParallel", "FSDP2 over --tensor-parallel ranks per layer"),
    "pp": ("pp.PipelineParallel", "consecutive blocks on consecutive ranks"),
    "deepspeed": ("zero.Zero", "a DeepSpeed engine, configured by launch/ds_zero*.json"),
}
"""The choices of `--parallel`: where the class is, and its help. A new one is a line here."""


def parallelism_class(name: str) -> type[Parallelism]:
    """Return the class of `--parallel name`.

    Imports that class only: FSDP and pipelining take a second or two, which DDP need not wait for.
    """
    module, _, cls = PARALLELISMS[name][0].partition(".")
    return getattr(import_module(f"launch.parallel.{module}"), cls)
