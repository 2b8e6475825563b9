"""A run that is cut anywhere and goes on from its state raises the same alerts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import alerts_of, make_gain, make_record

from distmon.config import load_config
from distmon.record.evaluations import EvaluationHistory
from distmon.record.record import Record
from distmon.reduce.findings import Desync, NonFinite
from distmon.rules import (
    BUILTIN,
    RuleEngine,
    configure,
    convergence,
    evaluations,
    frozen,
    gain,
    gradients,
    loss,
    nonfinite,
    replicas,
    skipped_steps,
    tasks,
    updates,
    weights,
)
from distmon.rules.alert import Alert

FAMILIES = (
    *(convergence, evaluations, frozen, gain, gradients, loss, nonfinite, replicas, skipped_steps),
    *(tasks, updates, weights),
)
"""Rules that invented records can make fire; `test_second_corpus` cuts recorded runs."""

# Short windows, so that every rule can fire within a few records.
QUICK: dict[str, dict[str, Any]] = {
    **{rule.name: {"cooldown": 1, "patience": 2, "enabled": True} for rule in BUILTIN},
    "gain_absolute": {"limit": 1.3, "min_blocks": 2, "patience": 2},
    "grad_imbalance": {"min_layers": 2, "patience": 2},
    "grad_norm_low": {"enabled": True, "patience": 2},
    "loss_divergence": {"lost": 0.1, "patience": 1},
    "weight_collapse": {"patience": 1},
    "loss_spike": {"armed_after": 4, "window": 8, "cooldown": 1},
    "grad_norm_decay": {"patience": 2, "baseline": 2, "after_step": 0, "cooldown": 1},
    "gain_drift": {"window": 2, "confirmed": 2, "min_blocks": 2, "alone": 0.05},
    "update_ratio_high": {"after_step": 0, "patience": 2},
    "update_ratio_phase": {"after_step": 0, "patience": 2, "enabled": True},
    "loss_plateau": {"window": 20, "share": 0, "patience": 1},
    "no_improvement": {"steps": 20},
    "steps_skipped": {"min_steps": 2},
    "task_collapse": {"checks": 2},
    "bad_init": {"until_step": 1000, "changed": 1e9},
    "overfit": {"until_evaluation": 0, "cooldown": 1},
    "underfit": {"until_evaluation": 0, "cooldown": 1},
    "weight_norm_spike": {"cooldown": 1},
    "slow_improvement": {"share": 0},
    "lr_check": {"cooldown": 1},
}

ACTIVE = configure(BUILTIN, load_config({"rules": QUICK}, environ={}).rules)

_LEVELS = st.sampled_from([0.0, 1e-9, 1e-4, 0.02, 0.5, 0.95, 1.0, 1.2, 1.29, 3.0, 40.0, 2e4])
_VALUES = st.one_of(_LEVELS, st.just(math.nan), st.just(math.inf))
_PARAM = st.fixed_dictionaries(
    {
        "weight_norm": _VALUES,
        "weight_std": _VALUES,
        "grad_norm": _VALUES,
        "update_ratio": _VALUES,
        "update_expected": st.sampled_from([0.0, 1.0]),
    }
)
_METRICS = st.dictionaries(
    st.sampled_from(
        [
            "train/lr",
            "train/step_loss_ema",
            "train/unclipped_grad_norm",
            "monitor/grad_norm",
            "monitor/update_ratio_median",
            "gradient_monitor/mean_gain",
            "train/skipped_steps",
        ]
    ),
    _VALUES,
)
_MOMENT = st.fixed_dictionaries(
    {
        "params": st.lists(_PARAM, min_size=3, max_size=3),
        "metrics": _METRICS,
        "losses": st.lists(_VALUES, max_size=4),
        "gains": st.none() | st.lists(_VALUES, min_size=3, max_size=3),
        "evaluations": st.lists(st.tuples(st.none() | _VALUES, _VALUES), max_size=2),
        "tasks": st.dictionaries(st.sampled_from("abc"), _VALUES),
        "desync": st.booleans(),
        "located": st.booleans(),
    }
)


def _records(moments: Sequence[dict[str, Any]]) -> list[Record]:
    history, records = EvaluationHistory(), []
    for i, moment in enumerate(moments, start=1):
        step = 10 * i
        losses = {step - 5 + k: loss for k, loss in enumerate(moment["losses"])}
        records.append(
            make_record(
                step,
                {f"blocks.{k}.mlp.w": numbers for k, numbers in enumerate(moment["params"])},
                metrics=moment["metrics"],
                losses=losses,
                loss_ema=losses,
                gradient_gain=None if moment["gains"] is None else make_gain(moment["gains"]),
                evaluations=tuple(
                    history.take(step + k, None, train, val)
                    for k, (train, val) in enumerate(moment["evaluations"])
                ),
                tasks=moment["tasks"],
                desync=Desync((1,), 0, ("w",), tie=False) if moment["desync"] else None,
                nonfinite=NonFinite(step, "loss", (), 0) if moment["located"] else None,
            )
        )
    return records


def _carried_on(engine: RuleEngine) -> RuleEngine:
    """A new engine with the state of the old one, as it comes out of a file."""
    text = json.dumps(engine.state_dict())
    other = RuleEngine(ACTIVE)
    other.load_state_dict(json.loads(text))
    assert json.dumps(other.state_dict()) == text
    return other


def _assert_cuts_change_nothing(records: Sequence[Record]) -> list[Alert]:
    """The alerts of a run that is cut after every record are those of one that is not."""
    whole, cut = RuleEngine(ACTIVE), RuleEngine(ACTIVE)
    alerts = []
    for record in records:
        expected = alerts_of(whole, record)
        assert repr(alerts_of(cut, record)) == repr(expected)
        alerts += expected
        cut = _carried_on(cut)
    return alerts


@settings(max_examples=40, deadline=None)
@given(st.lists(_MOMENT, min_size=1, max_size=10))
def test_a_cut_after_every_record_changes_nothing(moments: list[dict[str, Any]]) -> None:
    _assert_cuts_change_nothing(_records(moments))


def _stepped(i: int, values: Sequence[float]) -> float:
    return values[min(i, len(values) - 1)]


def test_every_rule_fires_and_goes_on_from_its_state() -> None:
    moments = []
    for i in range(24):
        late = i >= 12
        moments.append(
            {
                "params": [
                    {"update_ratio": 0.5, "weight_std": 0.1 if i % 12 < 6 else 2e4},
                    {"update_ratio": 1e-9, "weight_std": 1e-4, "weight_norm": 1e-4},
                    {"update_ratio": 0.0, "update_expected": 1.0, "grad_norm": 1e-9},
                ],
                "metrics": {
                    "train/lr": 1e-3,
                    "train/step_loss_ema": 1.5 if i == 0 else 3.0,
                    "train/unclipped_grad_norm": 1e-4 if late else 200.0,
                    "monitor/grad_norm": 1e-4 if late else 200.0,
                    "monitor/update_ratio_median": 0.5,
                    "train/skipped_steps": 9.0,
                },
                "losses": [9.0 if late else 3.0] * 3 + [90.0 if i % 6 == 4 else 3.0],
                "gains": [_stepped(i, (1.0, 1.05, 1.12, 1.2, 1.29, 1.5))] * 3,
                # Nothing moved, both fall slowly, and then they part for good.
                "evaluations": [[(3.0, 3.2), (3.0, 3.19), (2.8, 3.0), (1.0, 9.0)][min(3, i // 5)]]
                if i % 5 == 0 or late
                else [],
                "tasks": {"a": 9.0, "b": 1.0},
                "desync": i in (7, 8),
                "located": i in (10, 11),
            }
        )
    records = _records(moments)
    fired = {alert.rule for alert in _assert_cuts_change_nothing(records)}
    assert {rule.name for family in FAMILIES for rule in family.RULES} <= fired
