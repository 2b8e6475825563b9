"""DeepSpeed ZeRO: optimizer state, gradients and weights sharded over ranks, by stage."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distmon.errors import ConfigError
from distmon.layout.deepspeed import EngineLayout, import_deepspeed, skip_builds
from distmon.verify.parallelisms.parallelism import (
    BF16,
    DistributedModel,
    Limits,
    Parallelism,
    UnsupportedModelError,
)
from distmon.verify.parallelisms.workload import Workload, part_of

_FP32 = Limits(
    weights=1e-5, updates=1e-4, gradients=1e-4, loss=1e-6, bins=0.05, unowned_gradients=False
)
"""Weights are float32 where the reference is float64. An update is the difference of two weights:
a weight near 1 is rounded by 6e-8, which is 7e-5 of an update of 8e-4. A gradient is a sum of up to
1e5 products, each rounded by 6e-8: 2e-5 of its size in each layer that it passed. An element at the
edge of a bin may fall into the next."""
_BF16 = replace(BF16, unowned_gradients=False)


def _zero(workload: Workload, *, stage: int, bf16: bool = False) -> DistributedModel:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # DeepSpeed reads the variables of a launcher; values that a launcher has set are kept.
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        deepspeed: Any = import_deepspeed()
    except ConfigError as error:
        raise UnsupportedModelError(str(error)) from error
    skip_builds()
    model = workload.model.float()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=workload.optimizer(model.named_parameters()),
        config={
            "train_micro_batch_size_per_gpu": len(workload.batch(1)) // ranks,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "gradient_clipping": 0.0,  # the default is 1.0, and other parallelisms do not clip
            "steps_per_print": 10**9,
        },
    )
    layout = EngineLayout(engine)
    dtype = torch.bfloat16 if bf16 else torch.float32

    def backward(step: int) -> torch.Tensor:
        mine = part_of(workload.batch(step), rank, ranks)
        given = mine.to(dtype) if mine.is_floating_point() else mine
        loss = workload.loss(engine(given).float(), mine)
        engine.backward(loss)
        return loss.detach()

    return DistributedModel(
        [engine],
        [layout.inner],
        backward,
        shards=layout.shards,
        groups=layout.groups,
        step=engine.step,
        close=engine.destroy,
    )


PARALLELISMS = (
    *(
        Parallelism(
            f"zero{stage}",
            f"DeepSpeed ZeRO stage {stage}, fp32",
            partial(_zero, stage=stage),
            limits=_FP32,
        )
        for stage in (0, 1, 2, 3)
    ),
    *(
        Parallelism(
            f"zero{stage}-bf16",
            f"DeepSpeed ZeRO stage {stage}, bf16 with fp32 masters",
            partial(_zero, stage=stage, bf16=True),
            limits=_BF16,
        )
        for stage in (1, 2, 3)
    ),
)
