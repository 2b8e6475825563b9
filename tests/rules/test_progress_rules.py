"""Runs that learn nothing: flat and insensitive losses, wrong sign, decay, clips, repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.record.record import Record
from distmon.reduce.findings import NonFinite, NonFinitePlace
from distmon.rules.alert import Alert


def _records(
    losses: Callable[[int], float],
    count: int = 30,
    row: dict[str, float] | None = None,
    norm: Callable[[int], float] = lambda _: 1.0,
    ranks: Callable[[int], dict[str, float]] = lambda _: {},
    first: int = 10,
    **metrics: float,
) -> list[Record]:
    """Records of ten steps each; `losses` by step, `norm` and `ranks` by record."""
    records = []
    for i in range(count):
        end = first + 10 * i
        steps = range(end - 9, end + 1)
        found = {"train/lr": 1e-3, "train/step_loss_ema": losses(end), "monitor/grad_norm": norm(i)}
        records.append(
            make_record(
                end,
                {"a.weight": row or {}},
                losses={step: losses(step) * (1 + 0.002 * (-1) ** step) for step in steps},
                metrics={**found, **metrics},
                ranks={name: np.array([value]) for name, value in ranks(i).items()},
            )
        )
    return records


def _all(records: Sequence[Record]) -> list[Alert]:
    engine = make_engine()
    return [alert for record in records for alert in alerts_of(engine, record)]


def _of(rule: str, records: Sequence[Record]) -> list[tuple[int, str]]:
    return [(alert.step, alert.severity) for alert in _all(records) if alert.rule == rule]


FAR = {"update_ratio": 0.011}
"""A hundred steps move the weights by their norm."""


def test_a_flat_loss_is_an_info_once_the_weights_have_moved_far() -> None:
    assert _of("loss_flat", _records(lambda _: 2.3, 60, FAR)) == [(140, "info")]
    assert _of("loss_flat", _records(lambda _: 2.3, 60, {"update_ratio": 1e-4})) == []


@pytest.mark.parametrize(
    ("losses", "further"),
    [
        (lambda step: 2.3 - 0.004 * step, {}),  # it falls
        (lambda step: 2.3 if step < 30 else 1.5, {}),  # it has fallen
        (lambda _: 2.3, {"train/loss_expected_to_fall": 0.0}),
        (lambda _: 2.3, {"first": 5000}),  # resumed without its state
    ],
)
def test_other_losses_are_not_flat(losses: Any, further: dict[str, Any]) -> None:
    assert _of("loss_flat", _records(losses, 40, FAR, **further)) == []


def test_a_loss_that_no_weight_changes_is_a_warning() -> None:
    dead = {"grad_norm": 1e-4, "weight_norm": 10.0}
    assert _of("loss_insensitive", _records(lambda _: 2.3, 8, dead)) == [(40, "warning")]
    # What has been learned has small gradients, too; and a schedule that ends explains nothing.
    falls = _records(lambda step: 2.3 if step < 10 else 0.2, 8, dead)
    assert _of("loss_insensitive", falls) == []
    assert _of("loss_insensitive", _records(lambda _: 2.3, 8)) == []
    assert _of("loss_insensitive", _records(lambda _: 2.3, 8, dead, first=5000)) == []


def test_an_adapter_that_grows_from_zero_is_not_insensitive() -> None:
    records = [
        make_record(
            record.step,
            {"a.weight": {"grad_norm": 1e-4}, "b.weight": {"grad_norm": 1e-2, "weight_norm": i}},
            losses=record.losses,
            metrics=record.metrics,
        )
        for i, record in enumerate(_records(lambda _: 2.3, 12))
    ]
    assert _of("loss_insensitive", records) == []


def test_a_loss_that_climbs_little_by_little_is_an_info() -> None:
    def climbs(step: int) -> float:
        return max(3.0 - 0.05 * step, 1.0 + 0.01 * max(0, step - 60))

    assert {s for _, s in _of("loss_divergence", _records(climbs, 30))} == {"info"}
    large = _records(climbs, 30, norm=lambda i: 1.0 if i < 9 else 5.0)
    assert {s for _, s in _of("loss_divergence", large)} == {"warning"}
    jumps = _records(lambda step: max(3.0 - 0.05 * step, 1.0) if step < 150 else 2.4, 30)
    assert {s for _, s in _of("loss_divergence", jumps)} == {"warning"}


def test_gradients_are_compared_as_they_were_before_clipping() -> None:
    clipped = {"grad_norm": 1e-9}
    norms = {"train/unclipped_grad_norm": 1.0, "monitor/applied_grad_norm": 1e-9}
    assert _of("loss_insensitive", _records(lambda _: 2.3, 8, clipped, **norms)) == []


def test_clipping_that_leaves_nothing_is_named() -> None:
    row = {"grad_norm": 1e-9, "update_ratio": 2e-5}
    norms = {"train/unclipped_grad_norm": 1.0, "monitor/applied_grad_norm": 1e-9}
    records = _records(lambda _: 2.3, 6, row, **norms)
    (alert,) = [alert for alert in _all(records) if alert.rule == "not_learning"]
    assert "clipped to 1e-09 of their norm" in alert.message
    assert "clipping norm" in alert.advice[0]
    # Adam divides by the size of the gradient: while updates are usual, a clip does no harm.
    assert _of("not_learning", _records(lambda _: 2.3, 6, {"grad_norm": 1e-9}, **norms)) == []


@pytest.mark.parametrize(("lost_bound", "found"), [(1e-7, True), (0.02, False)])
def test_rounding_in_fp32_is_no_reason_for_tiny_updates(lost_bound: float, found: bool) -> None:
    """In bf16 it is one, and `update_lost` says so."""
    row = {
        "update_ratio": 1e-9,
        "update_norm": 1e-8,
        "update_lost_fraction": 0.9,
        "update_lost_bound": lost_bound,
    }
    tags = {"monitor/update_lost_fraction": 0.9, "train/unclipped_grad_norm": 1.0}
    alerts = _all(_records(lambda _: 2.3, 6, row, **tags, **{"monitor/applied_grad_norm": 1e-6}))
    assert bool([a for a in alerts if a.rule == "not_learning"]) is found
    assert bool([a for a in alerts if a.rule == "update_lost"]) is not found
    for alert in alerts:
        if found and alert.rule == "update_ratio_low":
            assert "clipping" in alert.advice[0], "it leaves a millionth of the gradients"


def test_a_loss_of_the_wrong_sign_falls_ever_faster() -> None:
    def faster(step: int) -> float:
        return -2.3 - 0.002 * step**2

    grows = _records(faster, 20, norm=lambda i: 1.0 + i)
    assert _of("wrong_sign", grows) == [(120, "warning")]
    assert _of("wrong_sign", _records(faster, 20)) == []  # its gradients stay as they are

    def slower(step: int) -> float:
        return -2.3 - 40 * (1 - 0.98**step)

    assert _of("wrong_sign", _records(slower, 20, norm=lambda i: 1.0 + i)) == []
    above = _records(lambda step: 3 - 0.01 * step**2, 20, norm=lambda i: 1.0 + i)
    assert _of("wrong_sign", above) == []


@pytest.mark.parametrize(
    ("late", "norm", "further", "goes_uphill"),
    [
        (lambda s: 1.0 + 0.03 * s, lambda i: 4.0 * i, {}, True),
        (lambda s: 1.0 * 1.03**s, lambda i: 4.0 * i, {}, True),
        # Harder data, or a term that is ramped up: the gradients stay as they are.
        (lambda s: 1.0 + 0.03 * s, lambda _: 1.0, {}, False),
        # Bad data: at once, and then it levels off.
        (lambda s: 5.0 - 4.0 * 0.93**s, lambda i: 4.0 * i, {}, False),
        # It stays below its start.
        (lambda s: 1.0 + 0.01 * s, lambda i: 4.0 * i, {}, False),
        # The rate is too high, or the loss need not fall.
        (lambda s: 1.0 + 0.03 * s, lambda i: 4.0 * i, {"monitor/update_ratio_median": 0.3}, False),
        (lambda s: 1.0 + 0.03 * s, lambda i: 4.0 * i, {"train/loss_expected_to_fall": 0.0}, False),
    ],
)
def test_a_loss_that_climbs_ever_on_goes_uphill(
    late: Any, norm: Any, further: dict[str, float], goes_uphill: bool
) -> None:
    def loss(step: int) -> float:
        return max(3.0 - 0.05 * step, 1.0) if step <= 100 else float(late(step - 100))

    records = _records(loss, 22, norm=lambda i: norm(i - 9) if i > 9 else 1.0, **further)
    found = _of("wrong_sign", records)
    assert bool(found) is goes_uphill
    if goes_uphill:
        assert 130 < found[0][0] <= 200
        divergence = next(a for a in _all(records) if a.rule == "wrong_sign")
        assert divergence.advice[0].startswith("check the sign")


def test_first_steps_that_destroy_the_weights() -> None:
    def bursts(step: int) -> float:
        return 1e4 if step == 2 else 2.3

    (alert,) = [a for a in _all(_records(bursts, 8)) if a.rule == "loss_spike"]
    assert (alert.step, alert.severity) == (30, "warning")
    assert "has not come below its start since" in alert.message
    assert alert.advice[0].startswith("halve the learning rate")
    # With a matrix whose units are dead it is named at once, and they are blamed on it.
    dead = {"grad_zero_fraction": 1.0, "has_grad": 1.0, "update_ratio": 0.0, "grad_norm": 0.0}
    alerts = _all(_records(bursts, 8, dead))
    assert [a.step for a in alerts if a.rule == "loss_spike"] == [10]
    (frozen,) = [a for a in alerts if a.rule == "frozen"]
    assert "likely cause: training was unstable since step 10 (loss_spike)" in frozen.message
    assert frozen.advice[0].startswith("halve the learning rate")


@pytest.mark.parametrize(
    "losses",
    [
        lambda step: 1e4 if step == 2 else 2.3 - 0.02 * step,  # it falls
        lambda step: 1e4 if step % 9 == 2 else 2.3,  # its tails are heavy
        lambda step: 20.0 if step == 2 else 2.3,  # not so far
    ],
)
def test_first_losses_that_differ(losses: Any) -> None:
    assert _of("loss_spike", _records(losses, 8)) == []


def test_the_tail_of_the_losses_says_how_far_the_next_one_may_be() -> None:
    def spikes(degrees: float, seed: int, spike: float = 0.0) -> list[int]:
        noise = np.random.default_rng(seed).standard_t(degrees, (500, 64))
        losses = (noise**2).mean(axis=1)  # squared errors of batches with outliers
        losses[450] = max(losses[450], spike * losses[322:450].max())
        averages = [*accumulate(losses, lambda average, loss: 0.99 * average + 0.01 * loss)]
        engine, found = make_engine(), []
        for end in range(10, 501, 10):
            steps = range(end - 9, end + 1)
            record = make_record(
                end,
                losses={step: float(losses[step - 1]) for step in steps},
                loss_ema={step: float(averages[step - 1]) for step in steps},
            )
            found += [a.step for a in alerts_of(engine, record) if a.rule == "loss_spike"]
        return found

    assert sum(len(spikes(3.0, seed)) for seed in range(8)) <= 3, "were 9"
    assert sum(460 in spikes(3.0, seed, 30.0) for seed in range(8)) >= 7
    assert all(spikes(30.0, seed, 3.0) == [460] for seed in range(8)), "tails are light"


def test_a_loss_that_rises_step_by_step_is_not_one_bad_batch() -> None:
    def climbs(step: int) -> float:
        return 2.3 * 1.6 ** max(0, step - 150)

    def spike(losses: Callable[[int], float]) -> Alert:
        records = _records(losses, 17)
        averaged = [replace(r, loss_ema=dict.fromkeys(r.losses, 2.3)) for r in records]
        return next(alert for alert in _all(averaged) if alert.rule == "loss_spike")

    alert = spike(climbs)
    assert "rose step by step" in alert.message
    assert alert.advice[0].startswith("halve the learning rate")
    assert "sign" in alert.advice[1]
    assert (
        spike(lambda step: 90.0 if step == 155 else 2.3).advice[0].startswith("inspect the batch")
    )


def test_decay_that_outweighs_learning() -> None:
    def decay(share: float) -> Callable[[int], dict[str, float]]:
        return lambda _: {"decay_per_step": share}

    flat = _records(lambda _: 2.3, 6, ranks=decay(0.1))
    assert _of("weight_decay_high", flat) == [(30, "warning")]
    falls = _records(lambda step: 2.3 * 0.99**step, 20, ranks=decay(0.1))
    assert {severity for step, severity in _of("weight_decay_high", falls) if step > 40} == set()
    assert _of("weight_decay_high", _records(lambda _: 2.3, 6, ranks=decay(1e-3))) == []


def _hashed(hashes: Callable[[int], float], losses: Callable[[int], float]) -> list[Record]:
    return _records(losses, 30, ranks=lambda i: {"batch_hash": hashes(i)})


def test_batches_that_repeat() -> None:
    def falls(step: int) -> float:
        return 2.3 * 0.99**step

    late = _hashed(lambda i: float(min(i, 8)), falls)
    assert _of("batch_repeats", late) == [(110, "warning")]
    assert _of("batch_repeats", _hashed(float, falls)) == []
    # The whole data may be one batch, or an epoch as long as the interval.
    assert _of("batch_repeats", _hashed(lambda _: 7.0, falls)) == [(110, "info")]
    assert _of("batch_repeats", _hashed(lambda i: float(i % 3), falls)) == [(110, "info")]
    assert _of("batch_repeats", _hashed(lambda i: float(i % 9), falls)) == []


def test_two_batches_are_no_variety() -> None:
    """On an accelerator hashes come one observation late: of the first step, then of the epoch."""
    hashes = _hashed(lambda i: 1.0 if i < 2 else 7.0, lambda step: 2.3 * 0.99**step)
    assert {severity for _, severity in _of("batch_repeats", hashes)} == {"info"}


def test_freezing_in_the_run_is_an_info_once() -> None:
    off = {"update_ratio": 0.0, "update_norm": 0.0, "requires_grad": 0.0, "has_grad": 0.0}
    records = [
        make_record(10 * i, {"a.weight": {}, "b.weight": {} if i < 4 else off})
        for i in range(1, 40)
    ]
    assert _of("frozen", records) == [(60, "info")]
    # Layer by layer it is one schedule; and what was off at first is named by `cannot_learn`.
    records = [
        make_record(10 * i, {f"{k}.weight": {} if i < 4 * k else off for k in range(4)})
        for i in range(1, 40)
    ]
    assert _of("frozen", records) == [(60, "info")]


def test_a_large_gradient_that_no_optimizer_steps_is_not_judged() -> None:
    def run(owned: float) -> list[tuple[int, str]]:
        row = {"grad_norm": 1e3, "weight_norm": 10.0, "in_optimizer": owned}
        return _of("grad_norm_high", _records(lambda _: 2.3, 4, row))

    assert run(1.0) == [(20, "warning")]
    assert run(0.0) == []


def _nan(losses: dict[int, float], ratio: float = 1e-3, lr: float = 1e-3) -> list[Record]:
    place = NonFinitePlace("a.weight", 0, 1, 0, 1, 0)
    before = _records(lambda _: 2.3, 3)
    end = make_record(
        40,
        {"a.weight": {"update_ratio": ratio}},
        losses=losses,
        nonfinite=NonFinite(38, "loss", (place,), 1),
        metrics={"train/lr": lr},
    )
    return [*before, end]


def test_a_nan_after_a_rise_is_blamed_on_the_rise() -> None:
    rising = {31 + i: 2.3 * 4.0**i if i < 7 else float("nan") for i in range(10)}
    alerts = {alert.rule: alert for alert in _all(_nan(rising))}
    assert "the NaN is the end of it" in alerts["nonfinite"].message
    assert alerts["nonfinite"].advice[0].startswith("halve the learning rate")
    assert all("nonfinite" not in alert.message for alert in alerts.values())


def test_a_nan_after_a_jump_of_the_rate_is_blamed_on_the_jump() -> None:
    planted = {31 + i: 2.3 if i < 7 else float("nan") for i in range(10)}
    (alone,) = _all(_nan(planted))
    assert "likely cause" not in alone.message
    alerts = {alert.rule: alert for alert in _all(_nan(planted, lr=0.1))}
    assert "likely cause: lr_jump at step 40" in alerts["nonfinite"].message
    assert "likely cause" not in alerts["lr_jump"].message


@pytest.mark.parametrize(("until", "explains"), [(20, True), (12, False)])
def test_a_cause_explains_symptoms_for_as_long_as_it_lasts(until: int, explains: bool) -> None:
    engine = make_engine()
    message = ""
    for i in range(1, 21):
        stale = {"stale_grad_norm": 2.0 if i <= until else 0.0, "local_grad_norm": 1.0}
        ranks = {name: np.array([value]) for name, value in stale.items()}
        norm = 100.0 if i == 20 else 1.0
        metrics = {"train/lr": 1e-3, "monitor/grad_norm": norm, "train/unclipped_grad_norm": norm}
        for alert in alerts_of(engine, make_record(100 * i, metrics=metrics, ranks=ranks)):
            message = alert.message if alert.rule == "grad_norm_high" else message
    assert message
    assert ("likely cause: stale_gradients" in message) == explains
