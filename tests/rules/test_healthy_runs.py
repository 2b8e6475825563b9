"""Rules on a run that went well, and on numbers that are none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sample_records import alerts_of, healthy_run, make_engine, make_record


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interval", [5, 10, 20])
def test_few_alarms_on_a_healthy_run(interval: int, seed: int) -> None:
    engine = make_engine()
    records = healthy_run(interval=interval, seed=seed)
    alerts = [alert for record in records for alert in alerts_of(engine, record)]
    assert {a.severity for a in alerts} <= {"info"}
    assert len(alerts) <= max(1, 0.05 * len(records))


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_a_run_that_goes_on_without_its_state(cut: int) -> None:
    engine = make_engine()
    for record in healthy_run()[cut : cut + 5]:
        assert alerts_of(engine, record) == []


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_no_number_makes_a_rule_fail(spoilt: float) -> None:
    """Whatever is in the metrics, columns, losses, gains, tasks and evaluations."""
    for record in (healthy_run(200)[i] for i in (0, 9, 19)):
        broken = replace(
            record,
            metrics=dict.fromkeys(record.metrics, spoilt),
            losses=dict.fromkeys(record.losses, spoilt),
            loss_ema=dict.fromkeys(record.loss_ema, spoilt),
            tasks=dict.fromkeys(record.tasks, spoilt),
            evaluations=tuple(
                replace(e, train_loss=spoilt, val_loss=spoilt, improvement=spoilt, gap=spoilt)
                for e in record.evaluations
            ),
        )
        for each in [
            broken,
            replace(broken, gradient_gain=None),
            replace(broken, params=type(record.params).empty()),
        ]:
            engine = make_engine()
            for one in (record, each, each, record, each, each, each):
                alerts = alerts_of(engine, one)
                assert all("nan" not in a.message for a in alerts if a.rule != "nonfinite"), alerts
        for columns in ("weight", "grad", "update"):
            table = record.params
            names = [name for name in table.columns if name.startswith(columns)]
            filled = {name: table.columns[name] * 0 + spoilt for name in names}
            bad = replace(record, params=replace(table, columns={**table.columns, **filled}))
            engine = make_engine()
            for one in (record, bad, bad, record, bad, bad, bad):
                alerts_of(engine, one)


def test_a_run_of_nothing() -> None:
    engine = make_engine()
    for step in range(5):
        assert alerts_of(engine, make_record(step)) == []
