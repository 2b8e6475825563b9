"""The CPU time of the writer process is a cost where training has no core to spare."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import distmon
from distmon.own_threads import cpu_seconds_of
from distmon.runtime import writer_cost
from distmon.runtime.writer_cost import WriterCost
from distmon.runtime.writer_process import WriterProcess
from tests.small_runs import quiet

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("device", "processes", "cores", "counts"),
    [(CPU, 1, 1, True), (CPU, 2, 2, True), (CPU, 1, 2, False), (OTHER, 8, 1, False)],
)
def test_it_counts_where_the_threads_of_training_are_on_all_cores(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, processes: int, cores: int, counts: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    used = [10.0]
    cost = WriterCost(lambda: used[0], device, processes, cores)
    used[0] = 10.5
    assert cost.take() == (0.5 if counts else 0.0)
    assert cost.take() == 0.0
    used[0] = 0.25  # of another writer, which has replaced the first
    assert cost.take() == (0.25 if counts else 0.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not say it")
def test_the_cpu_time_of_another_process() -> None:
    busy = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as process:
        deadline = time.monotonic() + 60
        while cpu_seconds_of(process.pid) < 0.05 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = cpu_seconds_of(process.pid)
        process.kill()
    assert found >= 0.05
    assert cpu_seconds_of(process.pid) == 0.0
    assert cpu_seconds_of(os.getpid()) > 0


def test_it_is_in_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [0.0]

    def cpu_seconds(_: WriterProcess) -> float:
        used[0] += 50.0
        return used[0]

    monkeypatch.setattr(WriterProcess, "cpu_seconds_elsewhere", cpu_seconds)
    monkeypatch.setattr(writer_cost, "_cores", lambda: 1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    settings = quiet(tmp_path, interval=2, writer="process", budget=None)
    with distmon.attach(model, optimizer, **settings) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        record = monitor.last_record
    assert record is not None
    assert record.ranks["monitor_seconds"][0] >= 50.0
