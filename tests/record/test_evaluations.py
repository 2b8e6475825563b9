"""Validation losses: from `Monitor.evaluated` into records, over ranks, resumes and the end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from late_outbox import make_late
from small_runs import quiet, small_model, train

import distmon
from distmon.record.evaluations import EvaluationHistory
from distmon.record.loss_ema import LossEma
from distmon.runtime import observation_cycle


def test_every_evaluation_is_compared_with_the_one_before() -> None:
    history = EvaluationHistory()
    first = history.take(100, 1.0, 3.2, 3.5)
    assert (first.number, first.improvement, first.train_improvement) == (1, None, None)
    assert first.gap == pytest.approx((3.5 - 3.2) / 3.2)
    second = history.take(200, 2.0, 2.1, 2.8)
    assert second.improvement == pytest.approx(0.2)
    assert second.train_improvement == pytest.approx(1.1 / 3.2)
    flat = [history.take(100 * i, None, None, 2.8 - 0.001 * i) for i in range(3, 7)]
    assert [e.unchanged for e in flat] == [1, 2, 3, 4]
    assert flat[0].gap is None
    assert history.take(700, None, None, 2.0).unchanged == 0


def test_a_loss_that_is_not_finite_is_compared_with_nothing() -> None:
    history = EvaluationHistory()
    history.take(1, None, 2.0, 2.0)
    bad = history.take(2, None, math.nan, math.nan)
    assert (bad.improvement, bad.gap) == (None, None)
    assert history.take(3, None, 1.0, 1.0).improvement == pytest.approx(0.5)


def test_history_goes_on_after_a_resume() -> None:
    values = [3.0, 2.9, 2.899, 2.898, 2.5, 2.6]
    whole = EvaluationHistory()
    expected = [whole.take(i, None, None, v) for i, v in enumerate(values)]
    for cut in range(len(values)):
        first, second = EvaluationHistory(), EvaluationHistory()
        found = [first.take(i, None, None, v) for i, v in enumerate(values[:cut])]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += [second.take(cut + i, None, None, v) for i, v in enumerate(values[cut:])]
        assert found == expected


def test_evaluations_are_in_the_next_record_or_told_at_the_end(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=2)) as monitor:
        train(model, optimizer, monitor, range(1, 3))
        monitor.evaluated(val_loss=torch.tensor(2.0), train_loss=1.0, epoch=0.5)
        train(model, optimizer, monitor, range(3, 5))
        record = monitor.last_record
        assert record is not None
        monitor.evaluated(val_loss=1.0)
        average = record.metrics["train/step_loss_ema"]
    (first,) = record.evaluations
    assert (first.step, first.epoch, first.val_loss, first.gap) == (2, 0.5, 2.0, 1.0)
    assert record.metrics["evaluation/train_val_gap"] == 1.0
    assert "evaluation/improvement_rate" not in record.metrics
    entries = distmon.read_run(tmp_path / "run").records
    assert [(e["step"], e["partial"]) for e in entries] == [(2, False), (4, False), (4, True)]
    late = entries[-1]["evaluations"][0]
    assert (late["number"], late["step"], late["improvement"]) == (2, 4, 0.5)
    assert late["train_loss"] == pytest.approx(average)


@pytest.mark.parametrize("late", [False, True])
def test_evaluations_that_no_record_has_yet_are_in_the_checkpoint(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late: one of them is in a record that is still on its way, for longer than is waited."""
    if late:
        monkeypatch.setattr(observation_cycle, "PATIENCE_S", 0.0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings, first = quiet(tmp_path, interval=10), 8 + late
    with distmon.attach(model, optimizer, **settings) as monitor:
        if late:
            make_late(monitor).delay = 10**9
        train(model, optimizer, monitor, range(1, first + 1))
        monitor.evaluated(val_loss=2.0, train_loss=1.0, epoch=0.5)
        train(model, optimizer, monitor, range(first + 1, first + 2))
        monitor.evaluated(val_loss=torch.tensor(1.5))
        state = json.loads(json.dumps(monitor.state_dict()))
    with distmon.attach(model, optimizer, **settings) as resumed:
        for _ in range(2):
            resumed.load_state_dict(state)
        train(model, optimizer, resumed, range(first + 2, 21))
    entries = distmon.read_run(tmp_path / "run", all_attempts=True).records
    delivered = [e for entry in entries if entry["attempt"] == 1 for e in entry["evaluations"]]
    assert [(e["number"], e["step"], e["epoch"], e["val_loss"]) for e in delivered] == [
        (1, first, 0.5, 2.0),
        (2, first + 1, None, 1.5),
    ]
    assert delivered[0]["gap"] == 1.0


def _evaluate_on_ranks(rank: int, _: int, folder: str) -> list[Any]:
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(Path(folder), interval=2)) as monitor:
        train(model, optimizer, monitor, range(1, 2))
        monitor.evaluated(val_loss=1.0 + rank, train_loss=1.0)
        if rank == 1:  # a trainer that validates on one rank only
            monitor.evaluated(val_loss=7.0, train_loss=1.0)
        train(model, optimizer, monitor, range(2, 3))
        assert monitor.last_record is not None
        found = [*monitor.last_record.evaluations]
        monitor.evaluated(val_loss=5.0)
        state = monitor.state_dict()
    with distmon.attach(model, optimizer, **quiet(Path(folder), interval=2)) as resumed:
        resumed.load_state_dict(state)
        train(model, optimizer, resumed, range(3, 5))
        assert resumed.last_record is not None
        return [*found, *resumed.last_record.evaluations]


def test_the_mean_over_the_ranks_that_gave_one_counts(tmp_path: Path) -> None:
    first, second = run_ranks(_evaluate_on_ranks, 2, str(tmp_path))
    assert first == second
    # The second one came back from a checkpoint on both ranks.
    assert [e.val_loss for e in first] == [pytest.approx((1.0 + 2.0 + 7.0) / 3), 5.0]


def test_an_average_with_decay_99_is_steady() -> None:
    torch.manual_seed(0)
    noisy = (3 + 0.3 * torch.randn(5000)).tolist()
    ema = LossEma(0.99)
    smooth = torch.tensor([ema.update(loss) for loss in noisy])[500:]
    assert smooth.var() < 0.1 * torch.tensor(noisy).var()
