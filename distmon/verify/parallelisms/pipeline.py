"""Pipeline parallelism: each rank holds some layers, named as in the whole model."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from distmon.verify.parallelisms.parallelism import (
    DistributedModel,
    Parallelism,
    UnsupportedModelError,
)
from distmon.verify.parallelisms.workload import Workload, part_of

_MICROBATCHES = 2


def _layers_of_stage(model: nn.Module, stage: int, stages: int) -> nn.Sequential:
    """Return the layers of one stage; they keep their names, and so do their parameters."""
    if not isinstance(model, nn.Sequential):
        raise UnsupportedModelError("only an nn.Sequential can be split into pipeline stages")
    layers = [*model.named_children()]
    if len(layers) < stages:
        raise UnsupportedModelError(f"{len(layers)} layers cannot be split into {stages} stages")
    begin, end = (len(layers) * i // stages for i in (stage, stage + 1))
    return nn.Sequential(OrderedDict(layers[begin:end]))


def _pipeline(workload: Workload, replicas: int = 1) -> DistributedModel:
    stages = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("replica", "stage"))
    replica, index = mesh["replica"].get_local_rank(), mesh["stage"].get_local_rank()
    layers = _layers_of_stage(workload.model, index, stages)
    rows = len(workload.batch(1))
    if rows % (_MICROBATCHES * replicas):
        raise UnsupportedModelError(
            f"{rows} rows cannot be split into {_MICROBATCHES} micro-batches"
        )
    stage = PipelineStage(
        layers, index, stages, torch.device("cpu"), group=mesh["stage"].get_group()
    )
    schedule = ScheduleGPipe(stage, _MICROBATCHES, loss_fn=workload.loss)

    def backward(step: int) -> torch.Tensor | None:
        mine = part_of(workload.batch(step), replica, replicas)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([mine] if index == 0 else []),
            target=mine if index == stages - 1 else None,
            losses=losses,
        )
        if replicas > 1:
            for gradient in (p.grad for p in layers.parameters() if p.grad is not None):
                dist.all_reduce(gradient, group=mesh["replica"].get_group())
                gradient.div_(replicas)
        return torch.stack(losses).mean().detach() if losses else None

    return DistributedModel([layers], [workload.optimizer(layers.named_parameters())], backward)


def _replicated_pipeline(workload: Workload) -> DistributedModel:
    return _pipeline(workload, replicas=2)


PARALLELISMS = (
    Parallelism("pp", "pipeline, one stage per rank", _pipeline),
    Parallelism(
        "pp+ddp",
        "2 replicas of a pipeline that average their gradients",
        _replicated_pipeline,
        min_ranks=4,
        rank_multiple=2,
    ),
)
