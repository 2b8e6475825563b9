"""Records with chosen numbers, for rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distmon.alert import Alert
from distmon.config import load_config
from distmon.metrics import PARAM_METRICS
from distmon.record import ParamTable, Record
from distmon.rules import BUILTIN, RuleEngine, configure, with_users_rules
from distmon.rules.base import Rule

HEALTHY = {
    "weight_norm": 10.0,
    "weight_std": 0.1,
    "grad_norm": 1.0,
    "grad_zero_fraction": 0.0,
    "update_norm": 0.01,
    "update_ratio": 1e-3,
    "update_lost_fraction": 0.0,
    "update_lost_bound": 0.0,
    "lr": 1e-3,
    "ndim": 2.0,
    "requires_grad": 1.0,
    "in_optimizer": 1.0,
    "has_grad": 1.0,
    "frozen": 0.0,
}


def make_record(
    step: int, params: dict[str, dict[str, float]] | None = None, **fields: Any
) -> Record:
    """A healthy record of `params`, each with the given numbers changed."""
    chosen = params or {"blocks.0.w": {}}
    columns = {
        m.name: np.array([{**HEALTHY, **c}.get(m.name, 0.0) for c in chosen.values()])
        for m in PARAM_METRICS
    }
    defaults: dict[str, Any] = {"time": 0.0, "world_size": 1, "metrics": {}, "ranks": {}}
    return Record(step=step, params=ParamTable(tuple(chosen), columns), **{**defaults, **fields})


def make_engine(own: Sequence[Rule] = (), **settings: Any) -> RuleEngine:
    """The built-in rules with the given settings, and the user's own."""
    config = load_config({"rules": settings}, environ={}).rules
    return RuleEngine(configure(with_users_rules(BUILTIN, config, own), config))


def alerts_of(engine: RuleEngine, record: Record) -> list[Alert]:
    """The alerts of one record; no rule may fail on it."""
    alerts, failures = engine.evaluate(record)
    assert failures == {}
    return alerts
