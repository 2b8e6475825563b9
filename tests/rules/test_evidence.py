"""What a warning needs beyond one observation: the run's own past, its schedule, its loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.record.record import Record
from distmon.reduce.findings import NonFinite, NonFinitePlace
from distmon.rules.alert import Alert

STILL = {"update_ratio": 0.0, "update_norm": 0.0}


def _all(records: list[Record]) -> list[Alert]:
    engine = make_engine()
    return [alert for record in records for alert in alerts_of(engine, record)]


def _of(rule: str, records: list[Record]) -> list[tuple[int, str]]:
    return [(alert.step, alert.severity) for alert in _all(records) if alert.rule == rule]


def _losses(medians: list[float], lrs: list[float] | None = None) -> list[Record]:
    """Records of ten steps each, with this median loss and learning rate."""
    records = []
    for i, middle in enumerate(medians):
        steps = range(10 * i + 1, 10 * i + 11)
        metrics = {"train/step_loss_ema": middle, "train/lr": lrs[i] if lrs else 1e-3}
        losses = {step: middle * (1 + 0.001 * (-1) ** step) for step in steps}
        records.append(make_record(10 * i + 10, losses=losses, metrics=metrics))
    return records


def test_a_parameter_that_moved_between_observations_is_not_frozen() -> None:
    def run(norm: Any) -> list[Record]:
        return [
            make_record(10 * i, {"a.weight": {}, "b.weight": {**STILL, "weight_norm": norm(i)}})
            for i in range(1, 8)
        ]

    # Its optimizer steps now and then, and not at the steps that are observed.
    assert _of("frozen", run(lambda i: 10.0 + 0.1 * i)) == []
    assert _of("frozen", run(lambda _: 10.0)) == [(30, "warning")]


def test_a_parameter_that_never_had_a_gradient_is_an_info() -> None:
    unused = {**STILL, "has_grad": 0.0, "grad_norm": 0.0}
    before = [make_record(10, {"a.weight": {}, "b.weight": {}})]
    records = [make_record(10 * i, {"a.weight": {}, "b.weight": unused}) for i in range(2, 7)]
    assert _of("frozen", records) == [(40, "info")]
    assert _of("frozen", before + records) == [(40, "warning")]


def test_an_optimizer_that_has_converged_freezes_nothing() -> None:
    falls = _losses([3.0, 2.0, 1.0, 0.5])
    norms = [1.0, 0.5, 0.1, 0.01, *[1e-4] * 4]
    records = [
        make_record(
            10 * (i + 1),
            {"a.weight": {} if i < 4 else STILL},
            losses=falls[min(i, 3)].losses,
            metrics={"monitor/grad_norm": norm},
        )
        for i, norm in enumerate(norms)
    ]
    assert _of("frozen", records) == []
    loud = [
        make_record(r.step, {"a.weight": {} if r.step < 50 else STILL}, metrics=r.metrics)
        for r in records
    ]
    assert _of("frozen", loud) == [(70, "warning")]  # the loss of this one has not fallen


def test_gradients_that_no_optimizer_steps_are_not_in_the_norm() -> None:
    def run(kept: dict[str, float]) -> list[Record]:
        params = {"head.weight": {"grad_norm": 1.0}, "body.weight": {"grad_norm": 5.0, **kept}}
        metrics = {"train/unclipped_grad_norm": 1.0, "monitor/applied_grad_norm": 26**0.5}
        return [make_record(10 * i, params, metrics=metrics) for i in range(1, 6)]

    assert _of("norm_mismatch", run({"requires_grad": 0.0, "in_optimizer": 0.0})) == []
    assert _of("norm_mismatch", run({})) == [(30, "warning")]


def test_a_rise_that_the_run_has_recovered_from_is_usual() -> None:
    waves = [3.0, 2.0, 2.8, 1.9, 2.7, 1.8, 2.6, 1.7]
    assert _of("loss_divergence", _losses([*waves, 2.5, 2.5, 2.5])) == []
    calm = [3.0, 2.6, 2.4, 2.2, 2.0, 1.9, 1.8, 1.7]
    assert _of("loss_divergence", _losses([*calm, 2.5, 2.5, 2.5])) == [(100, "warning")]


def test_a_loss_may_rise_where_the_schedule_starts_again() -> None:
    falls, rates = [3.0, 2.5, 2.2, 2.0, 1.9, 1.8], [1e-3, 9e-4, 6e-4, 3e-4, 1e-4, 5e-5]
    rises = [2.3, 2.3, 2.3]
    assert _of("loss_divergence", _losses(falls + rises, rates + [1e-3] * 3)) == []
    assert _of("loss_divergence", _losses(falls + rises, rates + [5e-5] * 3)) == [(80, "warning")]
    # At the same rate, but above where it began.
    worse = _losses([*falls, 3.5, 3.5], rates + [1e-3] * 2)
    assert _of("loss_divergence", worse) == [(80, "warning")]


def test_a_rate_of_zero_long_after_its_decay_is_named() -> None:
    rates = [1e-3, 8e-4, 5e-4, 2e-4, *[0.0] * 8]
    found = [a for a in _all(_losses([2.0] * 12, rates)) if a.rule == "lr_zero"]
    assert [a.step for a in found] == [100]
    assert "has been 0 for 50 steps" in found[0].message
    assert _of("lr_zero", _losses([2.0] * 8, [*rates[:4], *[0.0] * 4])) == []


def test_a_rate_that_rises_by_a_factor_each_time_does_not_jump() -> None:
    rises = [1e-6 * 4**i for i in range(8)]
    assert _of("lr_jump", _losses([2.0] * 8, rises)) == []
    assert _of("lr_jump", _losses([2.0] * 4, [1e-6, 1e-6, 1e-6, 4e-6])) == [(40, "warning")]


@pytest.mark.parametrize(("skipped", "weight", "expected"), [(1.0, 0, 0), (0.0, 0, 1), (1.0, 3, 1)])
def test_a_scaler_may_meet_an_overflow(skipped: float, weight: int, expected: int) -> None:
    place = NonFinitePlace("a.weight", 0, weight_nan=weight, weight_inf=0, grad_nan=0, grad_inf=2)
    found = NonFinite(step=8, signal="gradient norm", places=(place,), param_count=1)
    record = make_record(
        10, nonfinite=found, losses={9: 1.0}, metrics={"train/skipped_steps": skipped}
    )
    assert len(_of("nonfinite", [record])) == expected


def test_a_table_that_starts_near_zero_does_not_explode() -> None:
    def run(sizes: list[float]) -> list[Record]:
        return [
            make_record(10 * i, {"e.weight": {"weight_absmax": x, "weight_std": x / 20}})
            for i, x in enumerate(sizes, 1)
        ]

    assert _of("exploding_rows", run([0.1 * i for i in range(1, 20)])) == []
    assert _of("exploding_rows", run([0.1 * 2**i for i in range(8)])) == [(60, "warning")]


def test_first_steps_that_raise_the_loss_with_large_updates() -> None:
    rising = [4.0, 4.3, 17.0, 6.3, 5.9, 5.3, 4.3, 4.2, 4.5, 5.2]
    noisy = [4.0, 5.3, 7.0, 3.1, 5.9, 5.3, 2.3, 6.2, 4.5, 5.2]  # small batches

    def run(ratio: float, losses: list[float]) -> list[Record]:
        metrics = {"monitor/update_ratio_median": ratio, "train/lr": 0.3}
        return [make_record(10, losses=dict(enumerate(losses, 1)), metrics=metrics)]

    assert _of("loss_spike", run(0.05, rising)) == [(10, "warning")]
    assert _of("loss_spike", run(0.005, rising)) == []
    assert _of("loss_spike", run(0.05, noisy)) == []


@pytest.mark.parametrize(("half_ulp", "expected"), [(2**-9, [(30, "warning")]), (2**-25, [])])
def test_updates_are_lost_to_the_precision_of_weights_not_to_a_tiny_learning_rate(
    half_ulp: float, expected: list[tuple[int, str]]
) -> None:
    """In fp32 the advice to keep weights in fp32 would be wrong."""
    bound = 10.0 * half_ulp  # HEALTHY has a weight norm of 10
    lost = {"update_lost_fraction": 0.9, "update_lost_bound": bound, "update_norm": bound}
    row = {**lost, "update_ratio": half_ulp}
    assert _of("update_lost", [make_record(10 * i, {"w": row}) for i in (1, 2, 3)]) == expected


def test_rules_without_their_rank_metric_are_named() -> None:
    engine = make_engine()
    alerts_of(engine, make_record(10, ranks={"mode_layers": np.zeros(2)}))
    silent = engine.without_data()
    assert {"stale_gradients", "backward_repeated", "batch_repeats"} <= set(silent)
    assert "eval_mode" not in silent
