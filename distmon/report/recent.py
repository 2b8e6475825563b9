"""The recent part of a run that is going on, in bounded memory: what `watch` shows."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from distmon.errors import RunFolderError
from distmon.metrics import PHASES
from distmon.report.run_state import State, run_state
from distmon.runs.reader import RunTail

KEPT: Final = 2000
"""Losses and records."""


@dataclass(frozen=True)
class WorstParam:
    """A parameter with an extreme update ratio at the last observation."""

    name: str
    update_ratio: float
    grad_norm: float


@dataclass(frozen=True)
class RankLine:
    """The telemetry of one rank at the last observation."""

    rank: int
    step_seconds: float
    phase: str
    """The phase that takes longest against the median rank; empty with one rank."""
    excess_seconds: float


class RecentRun:
    """Reads what is new at each `update`; starts over when the run was resumed."""

    def __init__(
        self, path: str | os.PathLike[str], *, kept: int = KEPT, params: bool = True
    ) -> None:
        self._tail = RunTail(path)
        self._kept = kept
        self._reads_params = params
        self.path = self._tail.path
        self.waiting = ""
        """Why the folder cannot be read at the moment, as while it is replaced."""
        self._clear()

    def _clear(self) -> None:
        self.info: Mapping[str, Any] = {"attempts": []}
        self.losses: deque[float] = deque(maxlen=self._kept)
        self.records: deque[dict[str, Any]] = deque(maxlen=self._kept)
        self.alerts: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.alert_counts: dict[str, int] = {}
        """Alerts of the whole run by severity."""
        self._closed = False
        self._batch: Any = None

    def update(self) -> bool:
        """Read what is new and return whether there was anything.

        Raises RunFolderError at first; later the folder may be gone for a while.
        """
        try:
            news = self._tail.read()
        except RunFolderError as error:
            if not self.records:
                raise
            self.waiting = str(error)
            return False
        self.waiting = ""
        if news.replaces:
            self._clear()
        self.info, self._closed = news.info, news.closed
        self.losses += news.losses.values()
        self.records += news.records
        self.alerts += news.alerts
        for alert in news.alerts:
            severity = str(alert["severity"])
            self.alert_counts[severity] = self.alert_counts.get(severity, 0) + 1
        for batch in news.params if self._reads_params else ():
            if batch.num_rows:
                self._batch = batch
        return bool(news.replaces or news.records or news.alerts)

    def state(self, now: float) -> tuple[State, str]:
        """Return the state of the run, and why."""
        return run_state(self.info, [*self.records], [*self.alerts], now, self._closed)

    def series(self, tag: str) -> list[float]:
        """Return the values of a metric; NaN where it was not finite."""
        found = (record["metrics"].get(tag) for record in self.records)
        return [float(value) for value in found if value is not None]

    @property
    def observed(self) -> dict[str, Any] | None:
        """The newest record of an observation."""
        return next((r for r in reversed(self.records) if not r.get("partial")), None)

    def worst_params(self, count: int) -> list[WorstParam]:
        """Return parameters that are not finite, then those with the largest update ratio."""
        if self._batch is None:
            return []
        steps = self._batch["step"].to_numpy()
        last = self._batch.slice(int(np.flatnonzero(steps == steps[-1])[0]))
        ratio = last["update_ratio"].to_numpy(zero_copy_only=False)
        norm = last["grad_norm"].to_numpy(zero_copy_only=False)
        key = np.where(np.isfinite(ratio), ratio, -1.0)
        key[np.isnan(ratio) & np.isnan(norm)] = -2.0  # not measured
        for column in ("grad_nan", "weight_nan", "grad_inf", "weight_inf"):
            key[last[column].to_numpy(zero_copy_only=False) > 0] = math.inf
        order = [int(at) for at in np.argsort(-key, kind="stable")[:count] if key[at] > -2]
        names = last["name"]
        return [WorstParam(names[at].as_py(), float(ratio[at]), float(norm[at])) for at in order]

    def slowest_ranks(self, count: int) -> list[RankLine]:
        """Return the ranks that the others wait for, slowest in their own phases first."""
        record = self.observed
        seconds = _column(record, "step_seconds")
        if record is None or not len(seconds):
            return []
        own = {
            phase: column
            for phase in PHASES
            if phase not in ("communication", "other")
            and len(column := _column(record, f"{phase}_seconds")) == len(seconds)
        }
        lines = []
        for rank, step in enumerate(seconds):
            excess = {p: float(c[rank] - np.nanmedian(c)) for p, c in own.items()}
            excess = {p: value for p, value in excess.items() if math.isfinite(value)}
            phase = max(excess, key=lambda p: excess[p], default="")
            lines.append(RankLine(rank, float(step), phase, excess.get(phase, 0.0)))
        return sorted(lines, key=lambda line: -line.excess_seconds)[:count]


def _column(record: Mapping[str, Any] | None, metric: str) -> np.ndarray[Any, Any]:
    values = (record or {}).get("ranks", {}).get(metric) or ()
    return np.array([math.nan if value is None else value for value in values], np.float64)
