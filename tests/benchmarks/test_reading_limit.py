"""The loop that a sampled observation is held against reads what the monitor reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import distmon
from benchmarks.overhead.reading_limit import ReadingLoop, plan_of
from distmon.monitor import Monitor
from tests.small_runs import quiet


def test_it_reads_as_many_elements_as_the_plan_says(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5000, 16), nn.Linear(16, 3000))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    config = quiet(tmp_path, interval=1, sample_size="sampled")
    with distmon.attach(model, optimizer, config) as monitor:
        assert isinstance(monitor, Monitor)
        plan = plan_of(monitor)
        assert plan.plan_hash == monitor.cycle.observer.rows.plan.plan_hash
        try:
            loop = ReadingLoop(plan, [*model.parameters()], tmp_path)
        except SystemExit:
            pytest.skip("no C compiler")
    weights = sum(int(lengths.sum()) for _, lengths in loop.weights)
    assert weights == int(plan.numbers.count.sum())
    model(torch.arange(8)).sum().backward()
    loop.before_step()
    before = loop.seconds
    loop.after_step(torch.zeros(()))
    assert loop.seconds > before > 0
    assert 2.0**-1073 > 0, "denormal numbers are flushed"
