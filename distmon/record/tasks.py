"""Balance between the tasks of a multi-task model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from distmon.metrics import TASK_PREFIX


def task_ratios(norms: Mapping[str, float]) -> dict[str, float]:
    """Return each task's norm over the mean of the others; 1 means balance."""
    ratios = {}
    for name, norm in norms.items():
        others = [value for other, value in norms.items() if other != name]
        mean = sum(others) / len(others) if others else 0.0
        ratios[name] = norm / mean if mean > 0 else math.nan
    return ratios


def task_metrics(norms: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the tasks: two for each."""
    tags = {f"{TASK_PREFIX}{name}/grad_norm": norm for name, norm in norms.items()}
    return tags | {f"{TASK_PREFIX}{name}/ratio": r for name, r in task_ratios(norms).items()}
