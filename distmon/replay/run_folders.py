"""Rebuild the records of a run folder from `records.jsonl` and `params.arrow`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmon.metrics import PARAM_METRICS
from distmon.record.record import Evaluation, GainTable, InsideTable, ParamTable, Record
from distmon.reduce.findings import Desync, NonFinite, NonFinitePlace
from distmon.runs.reader import Run


def records_of_run(run: Run) -> list[Record]:
    """Return every record of the run, without steps that a later attempt replaced."""
    tables = _ParamTables(run.params)
    return [_record(entry, tables) for entry in run.records]


class _ParamTables:
    """Splits `params.arrow` into the table of each observation; columns are views, not copies."""

    def __init__(self, table: Any) -> None:
        steps, attempts = (table[key].to_numpy() for key in ("step", "attempt"))
        changes = (np.diff(steps) != 0) | (np.diff(attempts) != 0)
        edges = [0, *(np.flatnonzero(changes) + 1), len(steps)] if len(steps) else [0]
        self._rows = {
            (int(steps[begin]), int(attempts[begin])): slice(begin, end)
            for begin, end in pairwise(edges)
        }
        present = set(table.column_names)
        self._columns: dict[str, NDArray[np.float64]] = {
            metric.name: table[metric.name].to_numpy().astype(np.float64, copy=False)
            if metric.name in present
            else np.full(len(steps), np.nan)
            for metric in PARAM_METRICS
        }
        expected = self._columns["update_expected"]
        if "frozen" in present and np.isnan(expected).any():
            derived = _expected_before_0_2(self._columns, table["frozen"].to_numpy())
            self._columns["update_expected"] = np.where(np.isnan(expected), derived, expected)
        # A million rows have the same few hundred names, so they are stored as codes.
        names = table["name"].combine_chunks().dictionary_encode()
        self._dictionary: list[str] = names.dictionary.to_pylist()
        self._codes: NDArray[np.int32] = names.indices.to_numpy()
        self._last: tuple[NDArray[np.int32], tuple[str, ...]] = (self._codes[:0], ())

    def at(self, step: int, attempt: int) -> ParamTable:
        """Return the table of one observation; an empty one when nothing was written for it."""
        rows = self._rows.get((step, attempt))
        if rows is None:
            return ParamTable.empty()
        columns = {name: column[rows] for name, column in self._columns.items()}
        return ParamTable(self._names(self._codes[rows]), columns)

    def _names(self, codes: NDArray[np.int32]) -> tuple[str, ...]:
        before, names = self._last
        if not np.array_equal(before, codes):
            names = tuple(self._dictionary[code] for code in codes)
            self._last = (codes, names)
        return names


def _expected_before_0_2(
    columns: Mapping[str, NDArray[np.float64]], frozen: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Derive the evidence that 0.1 did not write: it wrote the verdict of one threshold instead."""
    conclusive = (columns["has_grad"] == 0) | (columns["grad_zero_fraction"] < 1)
    conclusive |= columns["in_optimizer"] == 0
    expected = (columns["requires_grad"] > 0) & ~(columns["lr"] == 0) & conclusive
    return np.asarray(expected | (frozen > 0), dtype=np.float64)


def _record(entry: Mapping[str, Any], tables: _ParamTables) -> Record:
    # A partial record follows the observation of the same step and has no parameters.
    partial = bool(entry.get("partial", False))
    params = ParamTable.empty() if partial else tables.at(entry["step"], entry["attempt"])
    steps = entry.get("loss_steps", ())
    averages = zip(steps, entry.get("loss_ema", ()), strict=False)
    gain, nonfinite, desync = (entry.get(key) for key in ("flow", "nonfinite", "desync"))
    return Record(
        step=entry["step"],
        time=_number(entry.get("time")),
        world_size=int(entry.get("world_size", 1)),
        metrics=entry.get("metrics", {}),
        params=params,
        ranks={name: _column(values) for name, values in entry.get("ranks", {}).items()},
        mfu_source=str(entry.get("mfu_source", "")),
        losses=dict(zip(steps, entry.get("loss_values", ()), strict=False)),
        # Before the first finite loss there is no average; the file has NaN there.
        loss_ema={step: value for step, value in averages if not math.isnan(value)},
        applied=bool(entry.get("applied", True)),
        gradient_gain=None if gain is None else _gain(gain),
        observation=entry.get("observation", 0),
        inside={kind: _inside(table) for kind, table in (entry.get("inside") or {}).items()},
        evaluations=tuple(_evaluation(each) for each in entry.get("evaluations", ())),
        tasks={name: _number(norm) for name, norm in entry.get("tasks", {}).items()},
        nonfinite=None if nonfinite is None else _nonfinite(nonfinite),
        desync=None if desync is None else _desync(desync),
        faults=tuple(entry.get("faults", ())),
        partial=partial,
    )


def _number(value: float | None) -> float:
    """Return NaN for null: JSON has no NaN."""
    return math.nan if value is None else float(value)


def _column(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([_number(value) for value in values], dtype=np.float64)


def _gain(entry: Mapping[str, Any]) -> GainTable:
    return GainTable(
        tuple(entry["blocks"]), _column(entry["input_norm"]), _column(entry["output_norm"])
    )


def _inside(entry: Mapping[str, Any]) -> InsideTable:
    columns = {name: _column(values) for name, values in entry["columns"].items()}
    return InsideTable(tuple(entry["names"]), columns)


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    return Evaluation(**{**entry, "val_loss": _number(entry["val_loss"])})


def _nonfinite(entry: Mapping[str, Any]) -> NonFinite:
    places = tuple(NonFinitePlace(**place) for place in entry["places"])
    return NonFinite(**{**entry, "places": places})


def _desync(entry: Mapping[str, Any]) -> Desync:
    return Desync(**{**entry, "ranks": tuple(entry["ranks"]), "params": tuple(entry["params"])})
