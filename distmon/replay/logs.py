"""Convert the log of another tool into records: losses and metrics, no parameters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from distmon.errors import DistmonError
from distmon.record.evaluations import EvaluationHistory, evaluation_metrics
from distmon.record.loss_ema import LossEma
from distmon.record.record import Evaluation, ParamTable, Record
from distmon.replay.column_names import (
    EPOCH,
    EVAL_TRAIN_LOSS,
    LOSS,
    LOSS_EMA,
    STEP,
    TIME,
    VAL_LOSS,
    choose_columns,
)

EMA_DECAY: Final = 0.99
_RECENT: Final = 100
"""Maximum number of losses that are averaged into the training loss of an evaluation."""
_NOT_OBSERVATIONS: Final = frozenset({LOSS, LOSS_EMA, VAL_LOSS, EVAL_TRAIN_LOSS, EPOCH, TIME, STEP})
"""Columns that do not mark a step as observed, since they are logged at other steps too."""


class LogError(DistmonError):
    """The log of another tool cannot be read, or has no column that rules use."""


@dataclass(frozen=True)
class Log:
    """Values by column and step, under the logger's own names."""

    columns: Mapping[str, Mapping[int, float]]
    times: Mapping[int, float] = field(default_factory=dict)
    """Unix seconds by step, where known."""
    name: str = ""
    """Name of the run, when a file holds several."""
    problems: tuple[str, ...] = ()
    """Problems of the file, one sentence each."""


def records_of_log(
    log: Log, requested: Mapping[str, str], interval: int | None
) -> tuple[list[Record], tuple[str, ...]]:
    """Return the records, and the columns that no rule uses.

    There is one observation for every step at which more than a loss was logged, or for every step
    if there are only losses; with `interval`, one per `interval` steps.
    """
    mapping = choose_columns(log.columns, requested)
    if not set(mapping) - {STEP, TIME, EPOCH}:
        names = ", ".join(log.columns) or "none"
        raise LogError(
            f"no column is known to the rules (columns: {names}); map one with --map loss=COLUMN"
        )
    chosen = {metric: log.columns[column] for metric, column in mapping.items()}
    used = set(mapping.values())
    unused = tuple(column for column in log.columns if column not in used)
    return _RecordBuilder(chosen, log.times).records(interval), unused


class _RecordBuilder:
    """Builds records step by step, as a monitor would have done."""

    def __init__(
        self, chosen: Mapping[str, Mapping[int, float]], times: Mapping[int, float]
    ) -> None:
        self._chosen = chosen
        self._times = times
        self._ema = LossEma(EMA_DECAY)
        self._history = EvaluationHistory()
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def records(self, interval: int | None) -> list[Record]:
        logged = [
            series for metric, series in self._chosen.items() if metric not in (STEP, TIME, EPOCH)
        ]
        steps = sorted(set().union(*logged))
        ends = self._ends(steps, interval)
        records: list[Record] = []
        since: list[int] = []
        for step in steps:
            since.append(step)
            if step in ends:
                records.append(self._record(since))
                since = []
        return records

    def _ends(self, steps: list[int], interval: int | None) -> Set[int]:
        """Return the steps at which a record ends."""
        if interval is not None:
            return set({math.ceil(step / interval): step for step in steps}.values())
        observed: set[int] = set()
        for metric, series in self._chosen.items():
            if metric not in _NOT_OBSERVATIONS:
                observed |= set(series)
        return observed | set(steps[-1:]) if observed else set(steps)

    def _record(self, steps: Iterable[int]) -> Record:
        losses: dict[int, float] = {}
        averages: dict[int, float] = {}
        metrics: dict[str, float] = {}
        evaluations: list[Evaluation] = []
        for step in steps:
            values = {metric: s[step] for metric, s in self._chosen.items() if step in s}
            if LOSS in values:
                losses[step] = values[LOSS]
                average = values.get(LOSS_EMA, self._ema.update(values[LOSS]))
                if average is not None:
                    averages[step] = metrics[LOSS_EMA] = average
                if math.isfinite(values[LOSS]):
                    self._recent.append(values[LOSS])
            metrics |= {m: v for m, v in values.items() if m not in (EPOCH, STEP, TIME)}
            if VAL_LOSS in values:
                evaluations.append(self._evaluation(step, values))
        if evaluations:
            metrics = evaluation_metrics(evaluations[-1]) | metrics
        return Record(
            step=step,
            time=self._times.get(step, 0.0),
            world_size=1,
            metrics=metrics,
            params=ParamTable.empty(),
            ranks={},
            losses=losses,
            loss_ema=averages,
            evaluations=tuple(evaluations),
        )

    def _evaluation(self, step: int, values: Mapping[str, float]) -> Evaluation:
        train_loss = values.get(EVAL_TRAIN_LOSS)
        if train_loss is None and self._recent:
            # Not the moving average: in a sparse log it would cover too many steps.
            train_loss = fmean(self._recent)
        self._recent.clear()
        return self._history.take(step, values.get(EPOCH), train_loss, values[VAL_LOSS])
