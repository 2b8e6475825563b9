"""LoRA, probes and complex weights: what the records and the console say of them."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from small_runs import batch, quiet
from torch import nn

import distmon
from distmon.record.record import Record


class Lora(nn.Module):
    """A frozen matrix and a trained one of low rank beside it, which starts at zero."""

    def __init__(self, size: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, size) / size)
        self.up = nn.Parameter(torch.zeros(size, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Rotation(nn.Module):
    """A complex weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(size, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.phase).abs()


def _observe(model: nn.Module, folder: Path) -> tuple[Record, str]:
    """The last record of a short run, and what the console printed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained, "lr": 3e-3}])
    printed = StringIO()
    console = Console(file=printed, width=200)
    settings = quiet(folder, sinks=["console", "jsonl"], console=console)
    with distmon.attach(model, optimizer, **settings) as monitor:
        for step in range(1, 6):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        record = monitor.last_record
    assert record is not None
    return record, printed.getvalue()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Lora(32), nn.ReLU(), Lora(32)),
        lambda: nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 4)),
    ],
    ids=["lora", "probe"],
)
def test_only_trained_parameters_count(make: object, tmp_path: Path) -> None:
    record, printed = _observe(make(), tmp_path)  # type: ignore[operator]
    assert record.metrics["train/lr"] == 3e-3
    assert record.metrics["monitor/update_ratio_min"] > 0
    assert record.metrics["monitor/frozen_count"] == 0
    trained = record.params.columns["requires_grad"] > 0
    assert not trained.all()
    ratios = record.params.columns["update_ratio"][trained]
    assert record.metrics["monitor/update_ratio_median"] == pytest.approx(np.median(ratios))
    assert "lr:3e-3" in printed
    rules = {alert["rule"] for alert in distmon.read_run(tmp_path / "run").alerts}
    assert not rules & {"frozen", "steps_skipped", "update_ratio_low"}


def test_complex_weights_are_read(tmp_path: Path) -> None:
    model = nn.Sequential(Rotation(32), nn.Linear(32, 4))
    record, printed = _observe(model, tmp_path)
    row = record.params.row("0.phase")
    assert row["weight_norm"] == pytest.approx(model[0].phase.detach().abs().norm().item())
    assert row["grad_norm"] == pytest.approx(model[0].phase.grad.abs().norm().item())
    assert row["update_ratio"] > 0
    assert "3 parameters (196 elements)" in printed


def test_sparse_gradients_are_in_the_total(tmp_path: Path) -> None:
    """Without an error: all their values are read. Which updates they moved is not looked up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(60_000, 16, sparse=True, mode="mean"), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    printed = StringIO()
    settings = quiet(
        tmp_path, sinks=["console"], console=Console(file=printed, width=200), sample_size="sampled"
    )
    with distmon.attach(model, optimizer, **settings) as monitor:
        for step in range(1, 4):
            words = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            loss = model(torch.randint(60_000, (16, 8), generator=words)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step()
        record = monitor.last_record
    assert record is not None
    grads = (p.grad.to_dense() for p in model.parameters())  # type: ignore[union-attr]
    total = torch.stack([g.double().norm() for g in grads]).norm().item()
    assert record.metrics["monitor/grad_norm"] == pytest.approx(total, rel=1e-6)
    (line,) = (line for line in printed.getvalue().splitlines() if line.startswith("step:3 "))
    assert f"grad_norm:{total:.2g} " in line
    row = record.params.row("0.weight")
    assert row["grad_norm_stderr"] == 0
    assert row["update_norm"] > 0
    assert row["update_norm_stderr"] > 0
