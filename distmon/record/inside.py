"""Derive what is inside the model from reduced sums and maxima."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distmon.collect.inside.catalog import (
    ACTIVATION_MAXIMA,
    ACTIVATION_SUMS,
    ATTENTION_SUMS,
    EXPERT_SUMS,
    SPECTRUM_SUMS,
    Catalog,
    Segment,
)
from distmon.record.record import Column, InsideTable

_SUMMARIES: Final = {
    "inside/activation_rms_max": ("activations", "rms", np.nanmax),
    "inside/dead_fraction_max": ("activations", "dead_fraction", np.nanmax),
    "inside/saturated_fraction_max": ("activations", "saturated_fraction", np.nanmax),
    "inside/effective_rank_min": ("activations", "effective_rank", np.nanmin),
    "inside/attention_logit_max": ("attention", "logit_max", np.nanmax),
    "inside/attention_entropy_min": ("attention", "relative_entropy", np.nanmin),
    "inside/expert_load_max": ("experts", "load_max", np.nanmax),
    "inside/expert_diversity_min": ("experts", "diversity", np.nanmin),
    "inside/dead_expert_fraction_max": ("experts", "dead_fraction", np.nanmax),
    "inside/dropped_token_fraction_max": ("experts", "dropped_fraction", np.nanmax),
    "inside/spectral_norm_max": ("spectra", "spectral_norm", np.nanmax),
}


def inside_metrics(tables: Mapping[str, InsideTable]) -> dict[str, float]:
    """Return the metrics of the run: the extremes over all rows of a kind."""
    found = {}
    for tag, (kind, column, extreme) in _SUMMARIES.items():
        table = tables.get(kind)
        values = None if table is None else table.columns[column]
        if values is not None and not np.isnan(values).all():
            found[tag] = float(extreme(values))
    return found


class InsideWindow:
    """The tables of one observation after another; keeps which units were active of late."""

    def __init__(self, catalog: Catalog, window: int) -> None:
        """`window`: measurements without activity after which a unit or an expert is dead."""
        self._catalog = catalog
        self._slots: deque[tuple[NDArray[np.float32], Column]] = deque(maxlen=window)
        """Unit slots and positions of the last measurements."""
        self._loads: dict[str, deque[Column]] = {
            name: deque(maxlen=window) for name, _ in catalog.experts
        }

    def tables(
        self, sums: Column, maxima: NDArray[np.float32], failed: Column
    ) -> dict[str, InsideTable]:
        """Return the tables by kind. With a rank missing, they would be those of a part."""
        if not self._catalog or failed.any():
            return {}
        found = {
            "activations": self._activations(sums, maxima),
            "attention": self._attention(sums, maxima),
            "experts": self._experts(sums),
            "spectra": self._spectra(sums),
        }
        return {kind: table for kind, table in found.items() if table is not None}

    def _activations(self, sums: Column, maxima: NDArray[np.float32]) -> InsideTable | None:
        names = self._catalog.activations
        segment = self._catalog.rows_of_activations
        rows = _named(_rows(sums, segment.sums, segment, len(names)), ACTIVATION_SUMS)
        tops = _rows(maxima, segment.maxima, segment, len(names), maxima=True).astype(np.float64)
        if not (rows["count"] != 0).any():  # NaN after a fault is not 0
            return None
        absmax, units, bounded = (tops[:, i] for i in range(len(ACTIVATION_MAXIMA)))
        self._slots.append(
            (tops[:, len(ACTIVATION_MAXIMA) :].astype(np.float32), rows["positions"])
        )
        count = np.where(rows["count"] > 0, rows["count"], np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean, square = rows["total"] / count, rows["squares"] / count
            samples = np.where(rows["samples"] > 0, rows["samples"], np.nan)
            rank = rows["trace_square"] / np.where(
                rows["square_trace"] > 0, rows["square_trace"], np.nan
            )
            rms = np.sqrt(square)
            columns = {
                "mean": mean,
                "std": np.sqrt(np.maximum(square - mean**2, 0.0)),
                "absmax": np.where(np.isnan(count), np.nan, absmax),
                "rms": rms,
                "norm": rms * np.sqrt(np.maximum(units, 0.0)),
                "zero_fraction": rows["zeros"] / count,
                "dead_fraction": self._dead_units(),
                "saturated_fraction": np.where(bounded > 0, rows["saturated"] / count, np.nan),
                "effective_rank": np.clip(rank, 1.0, np.maximum(units, 1.0)) + 0 * samples,
                "spread": rows["trace"]
                / np.where(rows["sampled_square"] > 0, rows["sampled_square"], np.nan),
                "units": units,
                "positions": np.sum([each for _, each in self._slots], axis=0),
            }
        return _table(names, columns, ~(rows["count"] == 0))

    def _dead_units(self) -> Column:
        """Return the share of units that were zero wherever they were looked at in the window."""
        slots = np.max([each for each, _ in self._slots], axis=0)
        present = slots > -np.inf
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(
                (slots == 0).sum(1) / np.where(present.any(1), present.sum(1), np.nan)
            )

    def _attention(self, sums: Column, maxima: NDArray[np.float32]) -> InsideTable | None:
        names = self._catalog.attention
        segment = self._catalog.rows_of_attention
        rows = _named(_rows(sums, segment.sums, segment, len(names)), ATTENTION_SUMS)
        if not (rows["rows"] != 0).any():
            return None
        logit = _rows(maxima, segment.maxima, segment, len(names), maxima=True)[:, 0]
        count = np.where(rows["rows"] > 0, rows["rows"], np.nan)
        columns = {
            "logit_max": np.where(np.isnan(count), np.nan, logit.astype(np.float64)),
            "entropy": rows["entropy"] / count,
            "relative_entropy": rows["relative_entropy"] / count,
        }
        return _table(names, columns, ~(rows["rows"] == 0))

    def _experts(self, sums: Column) -> InsideTable | None:
        found: dict[str, dict[str, float]] = {}
        for name, experts, begin in self._catalog.rows_of_experts():
            row = dict(zip(EXPERT_SUMS, sums[begin:].tolist(), strict=False))
            loads = sums[begin + len(EXPERT_SUMS) :][:experts]
            total = float(loads.sum())
            if total == 0:
                continue
            self._loads[name].append(loads.copy())
            recent = np.sum(self._loads[name], axis=0)
            found[name] = _router(loads, row, recent)
        if not found:
            return None
        keys = next(iter(found.values()))
        columns = {key: np.array([row[key] for row in found.values()]) for key in keys}
        return InsideTable(tuple(found), columns)

    def _spectra(self, sums: Column) -> InsideTable | None:
        names = self._catalog.matrices
        segment = self._catalog.rows_of_matrices
        rows = _named(_rows(sums, segment.sums, segment, len(names)), SPECTRUM_SUMS)
        if not (rows["values"] > 0).any():
            return None
        count = np.where(rows["values"] > 0, rows["values"], np.nan)
        columns = {
            "spectral_norm": rows["norm"] / count,
            "spectral_norm_error": rows["error"] / count,
            "stable_rank": rows["stable_rank"] / count,
        }
        return _table(names, columns, rows["values"] > 0)


def _router(loads: Column, row: Mapping[str, float], recent: Column) -> dict[str, float]:
    """Return the statistics of one router from the tokens of each expert."""
    experts, total = len(loads), float(loads.sum())
    share = loads / total
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -float(np.sum(np.where(share > 0, share * np.log(share), 0.0)))
    chosen = total / row["tokens"] if row["tokens"] > 0 else np.nan
    return {
        "load_max": float(share.max()) * experts,
        "diversity": float(np.exp(entropy)) / experts,
        "dead_fraction": float((recent == 0).sum()) / experts + 0 * total,
        "dropped_fraction": row["dropped"] / total,
        "experts": float(experts),
        "experts_per_token": chosen,
        "fair_tokens": float(recent.sum()) / experts,
    }


def _rows(
    values: NDArray[Any], begin: int, segment: Segment, count: int, maxima: bool = False
) -> NDArray[Any]:
    columns = segment.max_columns if maxima else segment.sum_columns
    return values[begin : begin + count * columns].reshape(count, columns)


def _named(rows: NDArray[Any], columns: tuple[str, ...]) -> dict[str, Column]:
    return dict(zip(columns, rows.T, strict=True))


def _table(
    names: tuple[str, ...], columns: Mapping[str, Column], keep: NDArray[np.bool_]
) -> InsideTable:
    kept = tuple(name for name, kept in zip(names, keep, strict=True) if kept)
    return InsideTable(kept, {name: column[keep] for name, column in columns.items()})
