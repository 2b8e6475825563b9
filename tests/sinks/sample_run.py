"""Records of a made-up model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from csrc_triton.row_layout import BINS, HALF_BINS, KEY_BASE, KEY_SHIFT
from distmon.metrics import PARAM_METRICS
from distmon.record.record import ParamTable, Record
from distmon.runs.run_folder import RunFolder


def bin_of(value: float) -> int:
    """The bin as the row layout defines it, one value at a time."""
    bits = int(np.float32(abs(value)).view(np.uint32))
    magnitude = min(max((bits >> KEY_SHIFT) - KEY_BASE, 0), HALF_BINS - 1)
    return HALF_BINS + magnitude if value >= 0 else HALF_BINS - 1 - magnitude


def param_names(count: int) -> tuple[str, ...]:
    return tuple(f"blocks.{i // 2}.{('attn', 'mlp')[i % 2]}.weight" for i in range(count))


def build_record(step: int, params: int = 3, *, histogram: bool = True, **changes: Any) -> Record:
    rng = np.random.default_rng(step)
    columns = {metric.name: rng.random(params) for metric in PARAM_METRICS}
    gradients = rng.normal(size=(params, 64)).astype(np.float32)
    columns["grad_min"] = gradients.min(1).astype(np.float64)
    columns["grad_max"] = gradients.max(1).astype(np.float64)
    bins = np.zeros((params, BINS))
    for row in range(params):
        for value in gradients[row]:
            bins[row, bin_of(float(value))] += 1
    values: dict[str, Any] = {
        "step": step,
        "time": 1.7e9 + step,
        "world_size": 2,
        "metrics": {
            "train/step_loss": 2.1847,
            "train/step_loss_ema": 2.3,
            "monitor/update_ratio_median": 3.1e-3,
            "monitor/update_ratio_max": float(columns["update_ratio"].max()),
            "monitor/grad_norm": 0.81,
            "monitor/frozen_count": 0.0,
            "train/lr": 1e-3,
            "performance/tokens_per_second": 12_345.0,
            "performance/step_seconds": 0.041,
            "performance/monitor_fraction": 0.0003,
        },
        "params": ParamTable(param_names(params), columns, bins if histogram else None),
        "ranks": {"step_seconds": np.array([0.04, 0.041])},
        "losses": {step - 1: 2.5, step: 2.1847},
        "loss_ema": {step - 1: 2.4, step: 2.3},
    }
    return Record(**{**values, **changes})


MakeRecord = Callable[..., Record]
OpenFolder = Callable[..., RunFolder]
