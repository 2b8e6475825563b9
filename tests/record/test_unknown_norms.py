"""Where every sampled gradient is zero the norm is unknown, from the record to the console."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from small_runs import quiet
from torch import nn

import distmon
from distmon.sampling.designs import gradient_samples
from distmon.sinks.console import record_line

SIZE = 300


def _observed(tmp_path: Path, hidden: torch.Tensor, **settings: object) -> distmon.Record:
    """Return the record of a step in which only the `hidden` elements have a gradient."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(SIZE, SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **quiet(tmp_path, **settings)) as monitor:
        (model.weight * hidden).sum().backward()
        optimizer.step()
        monitor.step()
        record = monitor.last_record
    assert record is not None
    return record


def _not_sampled() -> torch.Tensor:
    (sample,) = gradient_samples(["weight"], [(SIZE, SIZE)], 0)
    hidden = torch.ones(SIZE * SIZE)
    hidden[torch.from_numpy(sample.indices)] = 0
    return hidden.view(SIZE, SIZE)


def test_a_sample_of_zeros_is_unknown_everywhere(tmp_path: Path) -> None:
    record = _observed(tmp_path, _not_sampled(), sample_size="sampled", seed=0)
    row = record.params.row("weight")
    assert math.isnan(row["grad_norm"])
    assert math.isnan(row["grad_norm_stderr"])
    assert not any("grad_norm" in tag for tag in record.metrics)
    assert "grad_norm:unknown" in record_line(record).plain
    (line,) = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert not any("grad_norm" in tag for tag in json.loads(line)["metrics"])
    alerts = tmp_path / "run" / "alerts.jsonl"
    assert not alerts.exists() or "gradient norm" not in alerts.read_text()


@pytest.mark.parametrize("sample_size", ["auto", "exact"])
def test_gradients_in_full_are_known(tmp_path: Path, sample_size: str) -> None:
    hidden = _not_sampled()
    record = _observed(tmp_path, hidden, sample_size=sample_size, seed=0)
    assert record.metrics["monitor/grad_norm"] == pytest.approx(float(hidden.norm()))
    assert record.metrics["monitor/grad_norm_stderr"] == 0


def test_a_gradient_of_zeros_that_is_read_in_full_is_zero(tmp_path: Path) -> None:
    record = _observed(tmp_path, torch.zeros(SIZE, SIZE), sample_size="auto", seed=0)
    assert record.metrics["monitor/grad_norm"] == 0
    assert record.metrics["monitor/grad_norm_stderr"] == 0
    assert "grad_norm:unknown" not in record_line(record).plain
