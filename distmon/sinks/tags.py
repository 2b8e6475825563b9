"""The tags of a dashboard, shared by the TensorBoard and wandb sinks.

By default their number does not depend on the number of parameters: only parameters that match
`param_tags` get their own tags, and at most `param_tag_cap` of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS
from distmon.probe.percentiles import magnitude_edges
from distmon.record.record import ParamTable, Record

logger = logging.getLogger("distmon")

LOSS_TAG: Final = "train/step_loss"
LOSS_EMA_TAG: Final = "train/step_loss_ema"
PARAM_TAGS: Final[Mapping[str, str]] = {
    "gradients/{name}/norm": "grad_norm",
    "gradients/{name}/mean": "grad_mean",
    "gradients/{name}/std": "grad_std",
    "updates/{name}/ratio": "update_ratio",
    "updates/{name}/update_norm": "update_norm",
    "updates/{name}/weight_norm": "weight_norm",
}
HISTOGRAM_TAG: Final = "gradients_hist/{name}"
LARGEST: Final = float(np.finfo(np.float32).max)


def select_params(names: Sequence[str], globs: Sequence[str], cap: int) -> frozenset[str]:
    """Return the parameters with their own tags, in table order; warn if the cap drops some."""
    matching = [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
    if len(matching) > cap:
        logger.warning(
            "distmon: param_tags match %d parameters; only the first %d get tags (param_tag_cap)",
            len(matching),
            cap,
        )
    return frozenset(matching[:cap])


def scalars_by_step(record: Record) -> dict[int, dict[str, float]]:
    """Return the default scalars by step: losses at their own steps, others at the record's."""
    found: dict[int, dict[str, float]] = {}
    for tag, series in ((LOSS_TAG, record.losses), (LOSS_EMA_TAG, record.loss_ema)):
        for step, value in series.items():
            found.setdefault(step, {})[tag] = value
    at_record = found.setdefault(record.step, {})
    for tag, value in record.metrics.items():
        at_record.setdefault(tag, value)
    return dict(sorted(found.items()))


def param_scalars(params: ParamTable, selected: frozenset[str]) -> dict[str, float]:
    """Return the scalars of the selected parameters, without those that were not measured."""
    found: dict[str, float] = {}
    for row, name in _rows(params, selected):
        for tag, metric in PARAM_TAGS.items():
            value = float(params.columns[metric][row]) if metric in params.columns else math.nan
            if not math.isnan(value):
                found[tag.format(name=name)] = value
    return found


@dataclass(frozen=True)
class Histogram:
    """Gradient histogram of one parameter: `counts[i]` is between `edges[i]` and `edges[i + 1]`."""

    counts: NDArray[np.float64]
    edges: NDArray[np.float64]
    smallest: float
    largest: float
    total: float
    total_squares: float


def param_histograms(params: ParamTable, selected: frozenset[str]) -> dict[str, Histogram]:
    """Return the gradient histograms of the selected parameters, without empty outer bins."""
    if params.grad_histogram is None:
        return {}
    edges = histogram_edges()
    found: dict[str, Histogram] = {}
    for row, name in _rows(params, selected):
        counts = np.asarray(params.grad_histogram[row], dtype=np.float64)
        filled = np.flatnonzero(counts)
        if not filled.size:
            continue
        first, last = int(filled[0]), int(filled[-1]) + 1
        number = float(counts.sum())
        mean = _value(params, "grad_mean", row, 0.0)
        std = _value(params, "grad_std", row, 0.0)
        found[HISTOGRAM_TAG.format(name=name)] = Histogram(
            counts=counts[first:last],
            edges=edges[first : last + 1],
            smallest=_value(params, "grad_min", row, float(edges[first])),
            largest=_value(params, "grad_max", row, float(edges[last])),
            total=mean * number,
            total_squares=(std * std + mean * mean) * number,
        )
    return found


def histogram_edges() -> NDArray[np.float64]:
    """Return the BINS + 1 edges of the signed log bins in increasing order.

    The outermost edges are the largest float32, because dashboards reject infinity.
    """
    positive = np.append(magnitude_edges(), LARGEST)
    edges = np.concatenate([-positive[:0:-1], positive])
    assert edges.shape == (BINS + 1,)
    return edges


def _rows(params: ParamTable, selected: frozenset[str]) -> Iterator[tuple[int, str]]:
    if not selected:
        return iter(())
    return ((row, name) for row, name in enumerate(params.names) if name in selected)


def _value(params: ParamTable, metric: str, row: int, default: float) -> float:
    column = params.columns.get(metric)
    value = math.nan if column is None else float(column[row])
    return value if math.isfinite(value) else default
