"""The benchmark of the statistics inside the model measures each kind on a model that has it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import distmon
from benchmarks.inside_cost import ALL, KINDS, NONE, WORKLOADS, Trained, Workload, measure
from benchmarks.overhead.mixtral import Mixtral
from benchmarks.overhead.models import Gpt2

SMALL = {
    "gpt2": partial(Gpt2, layers=2, width=32, heads=2, vocabulary=64, context=128),
    "mixtral": partial(
        Mixtral, layers=2, width=32, heads=4, kv_heads=2, hidden=48, experts=4, vocabulary=64
    ),
}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_kind_has_a_row(workload: Workload) -> None:
    small = Workload(workload.name, SMALL[workload.name], 64, workload.contenders)
    rows = measure(small, Trained(small), rounds=1, count=1)
    assert [row.kind for row in rows] == [name for name in workload.contenders if name != NONE]
    assert all(row.sent_bytes > 0 for row in rows), "each kind sends something of its own"
    assert all(row.plain_step_seconds > 0 for row in rows)


def test_every_kind_is_measured_on_some_model() -> None:
    assert {name for each in WORKLOADS for name in each.contenders} == {*KINDS}
    assert all(ALL in each.contenders for each in WORKLOADS)


def test_the_experts_of_every_block_are_watched(tmp_path: Path) -> None:
    model: nn.Module = SMALL["mixtral"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"run_dir": tmp_path / "run", "sinks": [], "interval": 1}
    with distmon.attach(model, optimizer, inside="experts", **settings) as monitor:
        model(torch.arange(24).view(2, 12)).square().mean().backward()
        optimizer.step()
        monitor.step()
        record = monitor.last_record
    assert record is not None
    assert record.inside["experts"].names == ("blocks.0.mlp.gate", "blocks.1.mlp.gate")
