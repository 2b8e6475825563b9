"""A run as another logger kept it, made into records: losses and metrics, no parameters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from distmon.errors import DistmonError
from distmon.evaluations import EvaluationHistory, evaluation_metrics
from distmon.losses import LossEma
from distmon.record import Evaluation, ParamTable, Record
from distmon.replay.known_names import (
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
"""Most losses that stand for the training loss of an evaluation."""
_NO_OBSERVATION: Final = frozenset({LOSS, LOSS_EMA, VAL_LOSS, EVAL_TRAIN_LOSS, EPOCH, TIME, STEP})
"""What is logged more or less often than a monitor looks."""


class LogError(DistmonError):
    """A file that another logger wrote cannot be read or says nothing that rules could use."""


@dataclass(frozen=True)
class Log:
    """Values by column and step, under the logger's own names."""

    columns: Mapping[str, Mapping[int, float]]
    times: Mapping[int, float] = field(default_factory=dict)
    """Unix seconds by step, where they are known."""
    name: str = ""
    """Of the run, when a file holds several."""
    problems: tuple[str, ...] = ()
    """What was odd about the file, one sentence each."""


def records_of_log(
    log: Log, asked: Mapping[str, str], interval: int | None
) -> tuple[list[Record], tuple[str, ...]]:
    """The records, and the columns that no rule can use.

    One observation for every step at which more than a loss was logged, or for every step when
    there is nothing else; with `interval`, one for that many steps.
    """
    mapping = choose_columns(log.columns, asked)
    if not set(mapping) - {STEP, TIME, EPOCH}:
        names = ", ".join(log.columns) or "none"
        raise LogError(
            f"no column is known to the rules (columns: {names}); name one with --map loss=COLUMN"
        )
    chosen = {ours: log.columns[theirs] for ours, theirs in mapping.items()}
    used = set(mapping.values())
    unused = tuple(column for column in log.columns if column not in used)
    return _Observing(chosen, log.times).records(interval), unused


class _Observing:
    """Walks through the steps as a monitor would have done."""

    def __init__(
        self, chosen: Mapping[str, Mapping[int, float]], times: Mapping[int, float]
    ) -> None:
        self._chosen = chosen
        self._times = times
        self._ema = LossEma(EMA_DECAY)
        self._history = EvaluationHistory()
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def records(self, interval: int | None) -> list[Record]:
        judged = [
            series for ours, series in self._chosen.items() if ours not in (STEP, TIME, EPOCH)
        ]
        steps = sorted(set().union(*judged))
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
        """The steps at which a record is complete."""
        if interval is not None:
            return set({math.ceil(step / interval): step for step in steps}.values())
        looked: set[int] = set()
        for ours, series in self._chosen.items():
            if ours not in _NO_OBSERVATION:
                looked |= set(series)
        return looked | set(steps[-1:]) if looked else set(steps)

    def _record(self, steps: Iterable[int]) -> Record:
        losses: dict[int, float] = {}
        averages: dict[int, float] = {}
        metrics: dict[str, float] = {}
        evaluations: list[Evaluation] = []
        for step in steps:
            values = {ours: s[step] for ours, s in self._chosen.items() if step in s}
            if LOSS in values:
                losses[step] = values[LOSS]
                average = values.get(LOSS_EMA, self._ema.update(values[LOSS]))
                if average is not None:
                    averages[step] = metrics[LOSS_EMA] = average
                if math.isfinite(values[LOSS]):
                    self._recent.append(values[LOSS])
            metrics |= {o: v for o, v in values.items() if o not in (EPOCH, STEP, TIME)}
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
            # Not the moving average: over sparse rows it would look back too far.
            train_loss = fmean(self._recent)
        self._recent.clear()
        return self._history.take(step, values.get(EPOCH), train_loss, values[VAL_LOSS])
