"""Gradient norms: of all, over time, and layer by layer."""

from __future__ import annotations

import math
import random

import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.rules.alert import Alert

SHOWN, APPLIED = "train/unclipped_grad_norm", "monitor/grad_norm"


def _alerts(
    norms: list[float], tag: str = SHOWN, first: int = 100, preset: str = "absolute"
) -> list[Alert]:
    engine = make_engine(preset=preset, grad_imbalance={"enabled": False})
    found = []
    for i, norm in enumerate(norms):
        metrics = {tag: norm, "monitor/grad_norm": norm, "train/lr": 3e-3}
        record = make_record(first + 10 * i, metrics=metrics, losses={first + 10 * i: 3.0})
        found += alerts_of(engine, record)
    return found


@pytest.mark.parametrize("tag", [SHOWN, APPLIED])
@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([99.0, 50.0], []),
        ([101.0], [("grad_norm_high", "warning")]),
        ([1001.0], [("grad_norm_high", "critical")]),
        # It got worse: told again at once. 95 is inside the margin: still the same episode.
        ([101.0, 95.0, 101.0, 1001.0], [("grad_norm_high", w) for w in ("warning", "critical")]),
        ([5e-4, 5e-4], []),
        ([5e-4] * 3, [("grad_norm_low", "warning")]),
        ([math.nan, math.inf] * 5, []),
    ],
)
def test_high_and_low(tag: str, norms: list[float], expected: list[tuple[str, str]]) -> None:
    assert [(a.rule, a.severity) for a in _alerts(norms, tag)] == expected


def test_a_sample_may_have_missed_the_gradient() -> None:
    assert [a.rule for a in _alerts([0.0] * 3)] == ["grad_norm_low"]
    assert _alerts([0.0] * 3, APPLIED) == []
    engine = make_engine(preset="absolute")
    metrics = {APPLIED: 8e-4, "monitor/grad_norm_stderr": 2e-4}
    assert [alerts_of(engine, make_record(i, metrics=metrics)) for i in range(5)] == [[]] * 5


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_norm_is_compared_with_its_own_median(scale: float) -> None:
    usual = [scale * x for x in (1.0, 1.2, 0.8, 1.1)]
    assert _alerts([*usual, 25 * scale], preset="scale_free") == []
    (alert,) = _alerts([*usual, 42 * scale], preset="scale_free")
    assert (alert.rule, alert.severity, alert.step) == ("grad_norm_high", "info", 140)
    assert alert.measured == pytest.approx(40)
    _, again = _alerts([*usual, 42 * scale, 50 * scale], preset="scale_free")
    assert (again.severity, again.step) == ("warning", 150)
    _, again = _alerts([*usual, 4200 * scale, 5000 * scale], preset="scale_free")
    assert again.severity == "critical"


def test_the_norm_before_clipping_counts() -> None:
    metrics = {SHOWN: 500.0, APPLIED: 1.0, "train/lr": 3e-3}
    found = alerts_of(make_engine(preset="absolute"), make_record(100, metrics=metrics))
    messages = [alert.message for alert in found if alert.rule == "grad_norm_high"]
    assert messages == ["the gradient norm is 500, too large"]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_gradients_too_large_from_the_start(scale: float) -> None:
    """Norm x weight over the loss: the same whatever the loss is multiplied by."""
    engine = make_engine()
    found = []
    for step in (10, 20, 30):
        table = {"w": {"grad_norm": 20 * scale, "weight_norm": 10.0}}
        metrics = {APPLIED: 20 * scale}
        record = make_record(step, table, metrics=metrics, losses={step: 3.0 * scale})
        found += [a for a in alerts_of(engine, record) if a.rule == "grad_norm_high"]
    (alert,) = found
    assert (alert.step, alert.params) == (20, ("w",))
    assert alert.measured == pytest.approx(200 / 3)


def test_a_norm_far_below_its_start() -> None:
    (alert,) = _alerts([2.0] * 10 + [0.1] * 8, preset="scale_free")
    assert (alert.rule, alert.severity, alert.step) == ("grad_norm_decay", "info", 240)
    assert "0.05 of its 2.00e+00" in alert.message


def test_the_start_is_taken_after_the_warmup() -> None:
    engine = make_engine()
    for i in range(60):
        metrics = {SHOWN: 5.0 if i < 30 else 0.2, "train/lr": 1e-4 * min(i + 1, 30)}
        assert alerts_of(engine, make_record(100 + 10 * i, metrics=metrics)) == []


@pytest.mark.parametrize("interval", [1, 10, 100])
def test_a_language_model_that_settles_is_no_decay(interval: int) -> None:
    """From 30 in the first step over 3 to 0.4, whatever the interval."""
    noise = random.Random(interval)
    engine = make_engine()
    for step in range(interval, 200 * interval + 1, interval):
        norm = (0.4 + 3 * math.exp(-step / 200) + 27 * math.exp(-step / 5)) * noise.uniform(
            0.7, 1.4
        )
        metrics = {SHOWN: norm, "train/lr": 1e-3 * min(1, step / 100)}
        assert alerts_of(engine, make_record(step, metrics=metrics)) == []


def _layers(norms: list[float], name: str = "blocks") -> dict[str, dict[str, float]]:
    """Two matrices in each layer, with the same gradient norm."""
    return {
        f"{name}.{i}.{leaf}": {"grad_norm": norm}
        for i, norm in enumerate(norms)
        for leaf in ("up.weight", "down.weight")
    }


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    ("norms", "words", "layers"),
    [
        ([1.0, 1.0, 0.9, 0.5], None, ()),
        ([0.009, 0.1, 0.5, 1.0], "0.90% of the", ("blocks.0", "blocks.3")),
        ([0.009, 1.0, 1.0, 0.95], None, ()),  # one small layer: it does not vanish on the way
        ([0.009, 0.5, 1.0], None, ()),  # too few layers
        ([1.0, 1.0, 30.0, 1.0], None, ()),
        ([1.0, 1e-8, 1.0, 1.0], "no gradient reaches it", ("blocks.1",)),
        ([1.0, math.nan, 1.0, 1.0], None, ()),
        ([math.nan] * 4, None, ()),
    ],
)
def test_layers_against_each_other(
    norms: list[float], words: str | None, layers: tuple[str, ...], scale: float
) -> None:
    engine = make_engine()
    table = _layers([norm * scale for norm in norms])
    record = make_record(500, table, metrics={APPLIED: scale}, losses={500: 100.0 * scale})
    assert [alerts_of(engine, record) for _ in range(2)] == [[], []]
    found = alerts_of(engine, record)
    assert len(found) == (words is not None)
    for alert in found:
        assert alert.rule == "grad_imbalance"
        assert words in alert.message
        assert alert.layers == layers


def test_matrices_of_other_sizes_are_not_compared() -> None:
    table = _layers([1e-4, 0.1, 0.5, 1.0])
    for i, name in enumerate(table):
        table[name] |= {"weight_norm": 10.0 * 2 ** (i // 2)}
    engine = make_engine(grad_imbalance={"patience": 1})
    assert alerts_of(engine, make_record(500, table, metrics={APPLIED: 1.0})) == []


def test_stacks_are_separate_and_in_order_of_depth() -> None:
    norms = {2: 0.001, 9: 0.1, 10: 0.5, 11: 1.0}
    table = {f"h.{i}.w": {"grad_norm": norms[i]} for i in (10, 9, 2, 11)}
    table |= {"0.w": {"grad_norm": 1e-5}, "head.w": {"grad_norm": 1e-5}}
    engine = make_engine(grad_imbalance={"patience": 1})
    (alert,) = alerts_of(engine, make_record(500, table, metrics={APPLIED: 1.0}))
    assert alert.layers == ("h.2", "h.11")


def test_clipping_is_undone_before_a_norm_is_compared_with_a_limit() -> None:
    engine = make_engine(preset="absolute", grad_imbalance={"patience": 1})
    metrics = {SHOWN: 250.0, APPLIED: 1.0}
    found = alerts_of(engine, make_record(500, _layers([0.1, 0.5, 0.8]), metrics=metrics))
    (alert,) = [alert for alert in found if alert.rule == "grad_imbalance"]
    assert alert.measured == pytest.approx(125)
    assert "explodes" in alert.message


def test_a_skipped_step_is_no_observation() -> None:
    engine = make_engine()
    record = make_record(500, _layers([1e-9, 1.0]), metrics={APPLIED: 1.0}, losses={500: 9.0})
    skipped = make_record(501, _layers([math.nan] * 2), metrics={SHOWN: math.inf}, applied=False)
    assert [len(alerts_of(engine, r)) for r in (record, record, skipped, record)] == [0, 0, 0, 1]


def test_a_part_of_a_layer_without_gradient_is_named() -> None:
    """As of an MLP whose units are all off: momentum goes on moving it, so it is not frozen."""
    params = {
        f"blocks.{i}.{leaf}": {"grad_norm": 0.1, "ndim": 2.0}
        for i in range(3)
        for leaf in ("attn.weight", "mlp.up.weight", "mlp.down.weight")
    }
    params["blocks.1.mlp.up.weight"]["grad_norm"] = 0.0
    params["blocks.1.mlp.down.weight"]["grad_norm"] = 0.0
    engine = make_engine()
    record = {"monitor/grad_norm": 1.0}
    alerts = [
        a
        for step in (1, 2, 3)
        for a in alerts_of(engine, make_record(step, params, metrics=record))
        if a.rule == "grad_imbalance"
    ]
    (alert,) = alerts
    assert alert.params == ("blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight")
    assert alert.message.startswith("the gradient of blocks.1.mlp.up.weight is 0e+00 of that")
