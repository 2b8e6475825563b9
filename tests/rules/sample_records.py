"""Records with chosen numbers, for rules."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from distmon.config import load_config
from distmon.metrics import PARAM_METRICS
from distmon.record.evaluations import EvaluationHistory
from distmon.record.loss_ema import LossEma
from distmon.record.record import GainTable, ParamTable, Record
from distmon.rules import BUILTIN, RuleEngine, configure, with_users_rules
from distmon.rules.alert import Alert
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
    "update_expected": 1.0,
}


def make_record(
    step: int, params: dict[str, dict[str, float]] | None = None, **fields: Any
) -> Record:
    """A healthy record of `params`, each with the given numbers changed."""
    chosen = {name: {**HEALTHY, **c} for name, c in (params or {"blocks.0.w": {}}).items()}
    for given, c in zip((params or {}).values(), chosen.values(), strict=False):
        if "weight_std" in given and "weight_norm" not in given:
            c["weight_norm"] = 100 * c["weight_std"]  # 10,000 elements, as in HEALTHY
    columns = {
        m.name: np.array([c.get(m.name, 0.0) for c in chosen.values()]) for m in PARAM_METRICS
    }
    defaults: dict[str, Any] = {"time": 0.0, "world_size": 1, "metrics": {}, "ranks": {}}
    return Record(step=step, params=ParamTable(tuple(chosen), columns), **{**defaults, **fields})


def make_engine(own: Sequence[Rule] = (), **settings: Any) -> RuleEngine:
    """The built-in rules with the given settings, and the user's own."""
    config = load_config({"rules": settings}, environ={}).rules
    return RuleEngine(configure(with_users_rules(BUILTIN, config, own), config))


def make_gain(gains: Sequence[float]) -> GainTable:
    """Blocks with these gains."""
    blocks = tuple(f"blocks.{i}" for i in range(len(gains)))
    return GainTable(blocks, np.array(gains), np.ones(len(gains)))


def make_evaluations(
    train: Iterable[float | None], val: Iterable[float], every: int = 100, first: int = 100
) -> list[Record]:
    """One record for each evaluation."""
    history = EvaluationHistory()
    return [
        make_record(
            first + every * i,
            evaluations=(history.take(first + every * i, None, t, v),),
            metrics={"train/lr": 1e-3},
        )
        for i, (t, v) in enumerate(zip(train, val, strict=True))
    ]


def healthy_run(steps: int = 600, interval: int = 10, seed: int = 0) -> list[Record]:
    """A small language model from random weights, with the numbers of a run that went well."""
    noise, ema, history = random.Random(seed), LossEma(0.99), EvaluationHistory()
    records, losses, averages = [], {}, {}
    names = [f"blocks.{i}.{leaf}" for i in range(4) for leaf in ("attn.out.weight", "norm.bias")]
    for step in range(1, steps + 1):
        losses[step] = loss = 2.0 + 3.5 * math.exp(-step / 60) * noise.uniform(0.98, 1.02)
        averages[step] = ema.update(loss) or 0.0
        if step % interval:
            continue
        lr = 3e-3 * min(step / 20, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        size = noise.uniform(0.8, 1.25)
        norm = size * (0.5 + 2.5 * math.exp(-step / 30))
        table = {
            name: {
                "weight_std": (0.02 if name.endswith("weight") else 0.003) * (1 + step / steps),
                "ndim": 2.0 if name.endswith("weight") else 1.0,
                "grad_norm": norm * (0.3 if name.startswith("blocks.0") else 0.04),
                "update_ratio": 8 * lr * noise.uniform(0.8, 1.25),
                "lr": lr,
            }
            for name in names
        }
        gains = [1 + 60 * min(1, step / 40), 1.2 * size**0.2, 1.02, 0.97]
        evaluations = ()
        if step % 100 == 0:
            evaluations = (history.take(step, None, averages[step], averages[step] * 0.97),)
        records.append(
            make_record(
                step,
                table,
                metrics={
                    "train/lr": lr,
                    "train/step_loss_ema": averages[step],
                    "train/unclipped_grad_norm": norm,
                    "monitor/grad_norm": min(1.0, norm),
                    "monitor/grad_norm_stderr": 0.1,
                    "monitor/update_ratio_median": 8 * lr * noise.uniform(0.9, 1.1),
                    "gradient_monitor/mean_gain": sum(gains) / 4,
                },
                losses=losses,
                loss_ema=averages,
                gradient_gain=make_gain(gains),
                evaluations=evaluations,
                tasks={"words": norm, "tags": norm * noise.uniform(0.7, 1.4)},
            )
        )
        losses, averages = {}, {}
    return records


def alerts_of(engine: RuleEngine, record: Record) -> list[Alert]:
    """The alerts of one record; no rule may fail on it."""
    alerts, failures = engine.evaluate(record)
    assert failures == {}
    return alerts
