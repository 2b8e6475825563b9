"""A norm that the trainer reports as a DTensor, which is still to be reduced over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import distmon
from distmon.layout.reported import local_loss, local_norm


def _train(_rank: int, _world: int, folder: str, one_weight: bool) -> dict[str, Any]:
    """Train with FSDP2. The norm of one gradient is partial; torch may reduce that of many."""
    model = nn.Linear(32, 8, bias=False) if one_weight else small_model()
    fully_shard(model)
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(Path(folder))) as monitor:
        for step in range(1, 3):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            if one_weight:
                norm = torch.linalg.vector_norm(parameters[0].grad)
                nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)
            else:
                norm = nn.utils.clip_grad_norm_(parameters, 0.01)
            optimizer.step()
            monitor.step(loss=loss, grad_norm=norm)
        record = monitor.last_record
    assert record is not None
    return {
        "whole": norm.full_tensor().item(),
        "local": norm.to_local().item(),
        "is_partial": norm.placements[0].is_partial(),
        "metrics": dict(record.metrics),
        "faults": record.faults,
    }


@pytest.mark.parametrize("one_weight", [True, False])
def test_a_norm_that_is_partial_over_ranks_is_reduced_with_the_observation(
    one_weight: bool, tmp_path: Path
) -> None:
    found = run_ranks(_train, 2, str(tmp_path), one_weight)
    for each in found:
        assert each["faults"] == ()
        assert each["metrics"]["monitor/grad_norm"] == pytest.approx(each["whole"], rel=1e-6)
        assert each["metrics"]["train/unclipped_grad_norm"] == pytest.approx(each["whole"])
        assert each["metrics"]["monitor/applied_grad_norm"] < 0.02 < each["whole"]
    if one_weight:
        assert all(each["is_partial"] and each["local"] < 0.99 * each["whole"] for each in found)


def test_plain_numbers_are_the_total() -> None:
    assert local_norm(2.5) == (2.5, 0.0)
    norm = torch.tensor(3.0)
    assert local_norm(norm) == (norm, 0.0)
    assert local_loss(norm) is norm
