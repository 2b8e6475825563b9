"""A sparse gradient has the columns of its dense counterpart, without an error bar."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import quiet

import distmon


@pytest.mark.parametrize("sample_size", ["auto", "sampled"])
def test_norm_and_moments_are_those_of_the_dense_gradient(sample_size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Embedding(20_000, 32, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    settings = quiet(tmp_path, sample_size=sample_size)
    with distmon.attach(model, optimizer, **settings) as monitor:
        loss = model(torch.randint(0, 20_000, (64,))).square().mean()
        loss.backward()
        dense = model.weight.grad.to_dense().double()
        optimizer.step()
        monitor.step(loss=loss)
    assert monitor.last_record is not None
    row = monitor.last_record.params.row("weight")
    assert row["grad_norm"] == pytest.approx(dense.norm().item(), rel=1e-6)
    assert row["grad_norm_stderr"] == pytest.approx(0, abs=1e-9)
    assert row["grad_max"] == pytest.approx(dense.max().item())
    assert row["grad_min"] == pytest.approx(dense.min().item())
    assert row["grad_zero_fraction"] == pytest.approx((dense == 0).double().mean().item())
    assert row["grad_std"] == pytest.approx(dense.std().item(), rel=1e-4)
    assert monitor.last_record.metrics["monitor/grad_norm"] == pytest.approx(row["grad_norm"])
