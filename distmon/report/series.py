"""Lines and heat maps over steps, from the lines of `records.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distmon.metrics import PHASES
from distmon.report.downsampling import Reduction, bin_edges, binned, last_of
from distmon.report.encoding import number, numbers, packed, short_name

POINTS: Final = 1000
"""Points of a line; more observations are binned."""
LOSS_POINTS: Final = 2000
RANK_CELLS: Final = 300_000
"""Cells of all rank heat maps together."""
MAX_RANK_ROWS: Final = 1024
GAIN_CELLS: Final = 60_000
INSIDE_CELLS: Final = 20_000
"""Cells of each heat map of what is inside the model."""
INSIDE_SERIES: Final = {
    "activations": ("rms", "dead_fraction", "saturated_fraction", "effective_rank", "spread"),
    "attention": ("logit_max", "relative_entropy"),
    "experts": ("load_max", "diversity", "dead_fraction", "dropped_fraction"),
    "spectra": ("spectral_norm", "stable_rank"),
}
RANK_SERIES: Final = (
    "step_seconds",
    *(f"{phase}_seconds" for phase in PHASES),
    *("temperature_c", "gpu_utilization", "power_watts", "sm_clock_mhz", "memory_used_bytes"),
    *("allocated_bytes", "rss_bytes", "monitor_seconds"),
)
_EXTREMES: Final[Mapping[str, Reduction]] = {
    "monitor/grad_norm": "max",
    "monitor/applied_grad_norm": "max",
    "monitor/update_ratio_max": "max",
    "monitor/update_ratio_min": "min",
    "monitor/frozen_count": "max",
    "performance/step_seconds": "max",
}
"""What a bin keeps of a metric; of all others the mean."""
MAX_TAGS: Final = 2000
MAX_CELLS: Final = 20_000_000
"""Numbers of a heat map before it is reduced; a small file can name many blocks and ranks."""
Records = Sequence[Mapping[str, Any]]


def scalars(records: Records) -> dict[str, Any]:
    """Return every metric of the run by step; metrics of single parameters are left out."""
    seen = [r for r in records if not r.get("partial")] or [*records]
    steps = np.array([r["step"] for r in seen], np.int64)
    edges = bin_edges(len(steps), POINTS)
    tags = dict.fromkeys(tag for r in seen for tag in r["metrics"])
    values: dict[str, list[float | None]] = {}
    for tag in [tag for tag in tags if not tag.startswith("monitor/topk_frozen/")][:MAX_TAGS]:
        column = np.array([float(r["metrics"].get(tag, math.nan)) for r in seen])
        if np.isfinite(column).any():
            reduced = binned(column, edges, _EXTREMES.get(tag, "mean"))
            values[tag] = numbers(reduced.tolist())
    times = np.array([_time(r) for r in seen])
    return {
        "steps": last_of(steps, edges),
        "times": [None if math.isnan(t) else round(t, 2) for t in binned(times, edges, "max")],
        "values": values,
        "observations": len(seen),
    }


def losses(values: Mapping[int, float], averages: Mapping[int, float]) -> dict[str, Any]:
    """Return the loss of every step, with the lowest and highest of each bin, and its average."""
    steps = np.fromiter(values, np.int64, len(values))
    loss = np.fromiter(values.values(), np.float64, len(values))
    bad = steps[~np.isfinite(loss)]
    finite = np.where(np.isfinite(loss), loss, np.nan)
    edges = bin_edges(len(steps), LOSS_POINTS)
    ema = np.array([averages.get(int(step), math.nan) for step in steps])
    ema[~np.isfinite(loss)] = math.nan  # it stands still there, which looks like a plateau
    is_binned = len(edges) < len(steps)
    return {
        "steps": last_of(steps, edges),
        "mean": numbers(binned(finite, edges).tolist()),
        "low": numbers(binned(finite, edges, "min").tolist()) if is_binned else [],
        "high": numbers(binned(finite, edges, "max").tolist()) if is_binned else [],
        "ema": numbers(binned(ema, edges).tolist()),
        "per_point": math.ceil(len(steps) / max(1, len(edges))),
        "bad": [int(step) for step in bad[:: max(1, len(bad) // 200)]],
        "bad_count": len(bad),
    }


def evaluations(records: Records) -> list[dict[str, Any]]:
    """Return the evaluations, thinned to what a plot can show."""
    found = [each for record in records for each in record.get("evaluations") or ()]
    found = found[:: max(1, len(found) // POINTS)]
    keys = ("step", "val_loss", "train_loss", "gap", "improvement")
    return [{key: _short(each.get(key)) for key in keys} for each in found]


def tasks(records: Records) -> dict[str, Any]:
    """Return the gradient norm of each task by step."""
    seen = [record for record in records if record.get("tasks")]
    names = dict.fromkeys(name for record in seen for name in record["tasks"])
    edges = bin_edges(len(seen), POINTS)
    steps = np.array([record["step"] for record in seen], np.int64)
    columns = {n: np.array([_float(r["tasks"].get(n)) for r in seen]) for n in [*names][:20]}
    return {
        "steps": last_of(steps, edges),
        "values": {short_name(n): numbers(binned(c, edges).tolist()) for n, c in columns.items()},
    }


def gradient_gain(records: Records) -> dict[str, Any] | None:
    """Return the gain of each block by step; None where none was measured."""
    seen = [record for record in records if record.get("flow")]
    blocks = [*dict.fromkeys(block for record in seen for block in record["flow"]["blocks"])]
    if not blocks:
        return None
    blocks = blocks[: max(1, MAX_CELLS // len(seen))]
    place = {block: row for row, block in enumerate(blocks)}
    gains = np.full((len(blocks), len(seen)), np.nan)
    for column, record in enumerate(seen):
        flow = record["flow"]
        kept = [at for at, block in enumerate(flow["blocks"]) if block in place]
        rows = [place[flow["blocks"][at]] for at in kept]
        ends = [np.array([*map(_float, flow[e])])[kept] for e in ("input_norm", "output_norm")]
        with np.errstate(divide="ignore", invalid="ignore"):
            gains[rows, column] = np.where(ends[1] > 0, ends[0] / ends[1], np.nan)
    rows_kept = np.unique(np.linspace(0, len(blocks) - 1, min(len(blocks), 300)).astype(int))
    return _grid(
        [record["step"] for record in seen],
        gains[rows_kept],
        GAIN_CELLS // len(rows_kept),
        [short_name(blocks[row]) for row in rows_kept],
    )


def inside(records: Records) -> dict[str, Any] | None:
    """Return, by `kind/column`, the values of each row by step; None where none was measured."""
    grids = {}
    for kind, columns in INSIDE_SERIES.items():
        seen = [record for record in records if (record.get("inside") or {}).get(kind)]
        names = [*dict.fromkeys(name for r in seen for name in r["inside"][kind]["names"])]
        place = {name: row for row, name in enumerate(names)}
        kept = np.unique(np.linspace(0, len(names) - 1, min(len(names), 300)).astype(int))
        for column in columns if names else ():
            values = np.full((len(names), len(seen)), np.nan)
            for at, record in enumerate(seen):
                table = record["inside"][kind]
                rows = [place[name] for name in table["names"]]
                values[rows, at] = [
                    *map(_float, table["columns"].get(column) or [None] * len(rows))
                ]
            if np.isfinite(values).any():
                grids[f"{kind}/{column}"] = _grid(
                    [record["step"] for record in seen],
                    values[kept],
                    INSIDE_CELLS // len(kept),
                    [short_name(names[row]) for row in kept],
                )
    return grids or None


def rank_telemetry(records: Records) -> dict[str, Any] | None:
    """Return, by metric, the numbers of every rank by step; None without any."""
    seen = [record for record in records if record.get("ranks") and not record.get("partial")]
    metrics = [m for m in RANK_SERIES if any(_some(r["ranks"].get(m)) for r in seen)]
    if not metrics:
        return None
    count = max(len(r["ranks"].get(m, ())) for r in seen for m in metrics)
    count = min(count, max(1, MAX_CELLS // len(seen)))
    group = math.ceil(count / MAX_RANK_ROWS)
    rows = math.ceil(count / group)
    columns = max(8, RANK_CELLS // (rows * len(metrics)))
    steps = [record["step"] for record in seen]
    labels = [_rank_label(row * group, min(count, (row + 1) * group) - 1) for row in range(rows)]
    grids = {}
    for metric in metrics:
        values = np.full((rows * group, len(seen)), np.nan)
        for column, record in enumerate(seen):
            given = [*map(_float, record["ranks"].get(metric, ())[:count])]
            values[: len(given), column] = given
        # Of several ranks in one row the largest is shown: it is the straggler's.
        grouped = np.fmax.reduce(values.reshape(rows, group, -1), axis=1)
        grids[metric] = _grid(steps, grouped, columns)
    return {"labels": labels, "metrics": grids, "ranks": count, "group": group}


def _grid(
    steps: Sequence[int], values: NDArray[np.float64], columns: int, labels: Sequence[str] = ()
) -> dict[str, Any]:
    edges = bin_edges(len(steps), min(400, max(8, columns)))
    grid = {
        "steps": last_of(np.array(steps, np.int64), edges),
        "rows": len(values),
        "data": packed(binned(values, edges)),
    }
    return {**grid, "labels": [*labels]} if labels else grid


def _rank_label(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _some(values: Any) -> bool:
    return bool(values) and any(value is not None and math.isfinite(value) for value in values)


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _short(value: Any) -> Any:
    return number(value) if isinstance(value, float) else value


def _time(record: Mapping[str, Any]) -> float:
    return _float(record.get("time"))
