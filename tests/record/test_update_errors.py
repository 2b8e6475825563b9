"""Standard errors of updates: unknown where the sample missed what the gradient moves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import quiet
from torch import nn

import distmon

ROWS, WIDTH = 200_000, 16


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=1e-4)


def _updated(
    tmp_path: Path, rows: torch.Tensor, make: Any = _adam, **settings: object
) -> tuple[dict[str, float], float]:
    """Return the table's row in the record of a step on these rows, and the true update norm."""
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH)
    optimizer = make(table.parameters())
    with distmon.attach(table, optimizer, **quiet(tmp_path, **settings)) as monitor:
        for _ in range(2):
            before = table.weight.detach().clone()
            optimizer.zero_grad()
            table(rows).square().mean().backward()
            optimizer.step()
            monitor.step()
        record = monitor.last_record
    assert record is not None
    true = (table.weight.detach() - before).double().norm().item()
    return record.params.row("weight"), true


@pytest.mark.parametrize("sample_size", ["auto", "sampled"])
def test_an_update_that_the_sample_missed_has_no_error_bar(
    tmp_path: Path, sample_size: str
) -> None:
    """All that it sees is weight decay, the same in every row: an error bar would be tiny."""
    from distmon.sampling.designs import weight_samples

    (sample,) = weight_samples(["weight"], [(ROWS, WIDTH)], 1024, 0)
    seen = torch.zeros(ROWS * WIDTH, dtype=torch.bool)
    seen[torch.from_numpy(sample.indices)] = True
    missed = (~seen.view(ROWS, WIDTH).any(1)).nonzero().flatten()[:3]
    row, true = _updated(tmp_path, missed, sample_size=sample_size, seed=0)
    assert 0 < row["update_norm"] < true / 2
    assert math.isnan(row["update_norm_stderr"])


def test_an_update_of_which_the_sample_saw_some_has_one(tmp_path: Path) -> None:
    row, true = _updated(tmp_path, torch.arange(0, ROWS, 50), seed=0)
    assert abs(row["update_norm"] - true) <= 2 * row["update_norm_stderr"]


@pytest.mark.parametrize("seed", range(5))
def test_an_update_by_sgd_is_covered_where_one_row_dominates(tmp_path: Path, seed: int) -> None:
    """With one element of each row the dominant one is seen as any other; the gradient knows."""
    rows = torch.cat((torch.zeros(500, dtype=torch.long), torch.arange(0, ROWS, 400)))
    row, true = _updated(tmp_path, rows, lambda p: torch.optim.SGD(p, lr=10.0), seed=seed)
    assert abs(row["update_norm"] - true) <= 2 * row["update_norm_stderr"]
