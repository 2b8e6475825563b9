"""Standard errors of updates: unknown where the sample missed what the gradient moves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import quiet
from torch import nn

import distmon
from csrc_triton.row_layout import GROUPS, MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.record.sample_tables import SampleTable, Sampling
from distmon.record.statistics import Moments, moments
from distmon.reduce.reduced import Reduced
from distmon.sampling.designs import weight_samples
from distmon.sampling.sample import Sample
from distmon.sampling.sample_numbers import SampleNumbers
from distmon.sampling.samples import Samples

ROWS, WIDTH = 200_000, 16


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=1e-4)


class TableAndRest(nn.Module):
    """A table that is less than half of the model, so that not all of its rows are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Parameter(torch.zeros(ROWS * WIDTH + 1))
        self.table = nn.Embedding(ROWS, WIDTH)


def _updated(
    tmp_path: Path, rows: torch.Tensor, make: Any = _adam, **settings: object
) -> tuple[dict[str, float], float]:
    """Return the table's row in the record of a step on these rows, and the true update norm."""
    torch.manual_seed(0)
    model = TableAndRest()
    table = model.table
    optimizer = make(model.parameters())
    with distmon.attach(model, optimizer, **quiet(tmp_path, **settings)) as monitor:
        for _ in range(2):
            before = table.weight.detach().clone()
            optimizer.zero_grad()
            table(rows).square().mean().backward()
            optimizer.step()
            monitor.step()
        record = monitor.last_record
    assert record is not None
    true = (table.weight.detach() - before).double().norm().item()
    return record.params.row("table.weight"), true


@pytest.mark.parametrize("sample_size", ["auto", "sampled"])
def test_an_update_that_the_sample_missed_has_no_error_bar(
    tmp_path: Path, sample_size: str
) -> None:
    """All that it sees is weight decay, the same in every row: an error bar would be tiny."""
    shapes = {name: tuple(p.shape) for name, p in TableAndRest().named_parameters()}
    sample = weight_samples([*shapes], [*shapes.values()], 1024, 0)[1]
    seen = torch.zeros(ROWS * WIDTH, dtype=torch.bool)
    seen[torch.from_numpy(sample.indices)] = True
    missed = (~seen.view(ROWS, WIDTH).any(1)).nonzero().flatten()[:3]
    row, true = _updated(tmp_path, missed, sample_size=sample_size, seed=0)
    assert 0 < row["update_norm"] < true / 2
    assert math.isnan(row["update_norm_stderr"])


def test_an_update_of_which_the_sample_saw_some_has_one(tmp_path: Path) -> None:
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:4000]
    row, true = _updated(tmp_path, rows, seed=0)
    assert abs(row["update_norm"] - true) <= 2 * row["update_norm_stderr"]


@pytest.mark.parametrize("seed", range(5))
def test_an_update_by_sgd_is_covered_where_one_row_dominates(tmp_path: Path, seed: int) -> None:
    """With one element of each row the dominant one is seen as any other; the gradient knows."""
    rows = torch.cat((torch.zeros(500, dtype=torch.long), torch.arange(0, ROWS, 400)))
    row, true = _updated(tmp_path, rows, lambda p: torch.optim.SGD(p, lr=10.0), seed=seed)
    assert abs(row["update_norm"] - true) <= 2 * row["update_norm_stderr"]


def test_an_update_by_sgd_is_covered_where_few_elements_of_a_full_gradient_dominate(
    tmp_path: Path,
) -> None:
    """The bias of a head over a vocabulary: every word has a gradient, that of the batch's a large
    one. A sample without them varies little."""
    model = nn.Module()
    model.bias = nn.Parameter(torch.ones(1_000_000))
    slope = torch.full((1_000_000,), 1e-3)
    slope[::200_000] = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            (model.bias * slope).sum().backward()
            optimizer.step()
            monitor.step()
        record = monitor.last_record
    assert record is not None
    row, true = record.params.row("bias"), 0.1 * float(slope.double().norm())
    assert row["update_norm"] < true / 2
    assert abs(row["update_norm"] - true) <= 2 * row["update_norm_stderr"]


def _lossy_update(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return update and gradient of a table in bf16: few elements of the rows that move change.

    40 rows have a gradient and a fifth of their elements change; momentum moves 400 other rows, in
    which fewer elements change by less.
    """
    make = np.random.default_rng(0)
    update, grad = np.zeros((rows, width)), np.zeros((rows, width))
    touched, earlier = np.split(make.permutation(rows)[:440], [40])
    grad[touched] = 1.0
    update[touched] = make.random((40, width)) < 0.2
    update[earlier] = 0.2 * (make.random((400, width)) < 0.1)
    return update, grad


def _update_estimates(
    samples: list[Sample], update: np.ndarray, grad: np.ndarray, copies: int = 1
) -> Moments:
    """Estimate the norm of the update from each of the samples; gradients are read in full."""
    sums = np.zeros((len(samples), len(SUM_COLUMNS)))
    for i, sample in enumerate(samples):
        x, g = update.reshape(-1)[sample.indices], grad.reshape(-1)[sample.indices]
        sums[i, SUM["w_count"]] = sums[i, SUM["u_count"]] = len(x)
        squares = np.bincount(sample.element_groups, x * x, GROUPS)
        sums[i, SUM["u_sq0"] : SUM["u_sq0"] + GROUPS] = squares
        sums[i, SUM["g_count"]], sums[i, SUM["g_zero"]] = grad.size, (grad == 0).sum()
        sums[i, SUM["u_graded"]] = (g != 0).sum()
        sums[i, SUM["u_lost"]] = ((g != 0) & (x == 0)).sum()
    numel = np.full(len(samples), float(update.size))
    numbers = SampleNumbers.of(Samples.of(samples))
    tables = {"w": SampleTable.of(numbers, numel), "u": SampleTable.of(numbers, numel)}
    tables["g"] = SampleTable.whole(numbers, numel)
    names = tuple(sample.name for sample in samples)
    sampling = Sampling(names, tables, numel, numel * 0 + 2, np.ones(len(samples), dtype=bool))
    maxima = np.zeros((len(samples), len(MAX_COLUMNS)))
    reduced = Reduced(copies * sums, maxima, None, {}, {}, np.empty(0))
    return moments(reduced, sampling)["u"]


@pytest.mark.parametrize("run", [1, 8])
def test_an_update_of_which_little_changed_is_covered_or_unknown(run: int) -> None:
    """The spread within a sample is small where it missed the few elements that changed most."""
    update, grad = _lossy_update(20_000, 32)
    truth = np.linalg.norm(update)
    samples = [Sample(f"{i}", update.size, 0, 1, 8192 // run, run=run) for i in range(1000)]
    found = _update_estimates(samples, update, grad)
    known = np.isfinite(found.stderr)
    missed = np.abs(found.norm - truth)[known] / found.stderr[known]
    assert (missed <= 2).mean() >= 0.93
    assert missed.max() < 6  # no error bar is far too narrow
    assert known.mean() > 0.3


def test_replicas_do_not_make_an_error_smaller() -> None:
    update, grad = _lossy_update(20_000, 32)
    samples = [Sample(f"{i}", update.size, 0, 1, 8192, run=1) for i in range(5)]
    one, four = (_update_estimates(samples, update, grad, copies) for copies in (1, 4))
    np.testing.assert_allclose(four.stderr, one.stderr, rtol=1e-12)
