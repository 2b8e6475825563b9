"""Compare each reported validation loss with the ones before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmon.metrics import PENDING_EVALUATIONS
from distmon.record.record import Evaluation

UNCHANGED = 0.01
"""A validation loss that changes by less, relative to the one before, has not changed."""
PLATEAU = 3
"""Evaluations in a row without a change that make a plateau."""


class EvaluationHistory:
    """Compares every evaluation with the one before it. Small and checkpointable."""

    def __init__(self) -> None:
        self._number = 0
        self._train: float | None = None
        self._val: float | None = None
        self._unchanged = 0

    def take(
        self, step: int, epoch: float | None, train_loss: float | None, val_loss: float
    ) -> Evaluation:
        """Return the next evaluation of the run. A loss that is not finite is not compared."""
        self._number += 1
        improvement = _improvement(self._val, val_loss)
        train_improvement = _improvement(self._train, train_loss)
        if improvement is not None:
            self._unchanged = self._unchanged + 1 if abs(improvement) < UNCHANGED else 0
        gap = None
        if train_loss is not None and train_loss > 0 and math.isfinite(val_loss - train_loss):
            gap = (val_loss - train_loss) / train_loss
        if math.isfinite(val_loss):
            self._val = val_loss
        if train_loss is not None and math.isfinite(train_loss):
            self._train = train_loss
        return Evaluation(
            number=self._number,
            step=step,
            epoch=epoch,
            train_loss=train_loss,
            val_loss=val_loss,
            improvement=improvement,
            train_improvement=train_improvement,
            gap=gap,
            unchanged=self._unchanged,
        )

    def receive(
        self, ranks: Mapping[str, NDArray[np.float64]], train_loss: float | None
    ) -> tuple[Evaluation, ...]:
        """Return the evaluations in all slots, in step order, each a mean over ranks.

        `train_loss` is used where the trainer reported none.
        """
        reported: dict[int, list[NDArray[np.float64]]] = {}
        for i in range(PENDING_EVALUATIONS):
            columns = [ranks[f"eval{i}_{w}"] for w in ("step", "epoch", "train_loss", "val_loss")]
            for row in np.stack(columns, axis=1):
                if row[0] > 0:
                    reported.setdefault(int(row[0]), []).append(row)
        found = []
        for step, rows in sorted(reported.items()):
            _, epoch, train, val = (_mean(column) for column in np.stack(rows, axis=1))
            given = train_loss if train is None else train
            found.append(self.take(step, epoch, given, math.nan if val is None else val))
        return tuple(found)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "number": self._number,
            "train": self._train,
            "val": self._val,
            "unchanged": self._unchanged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._number, self._unchanged = int(state["number"]), int(state["unchanged"])
        train, val = state["train"], state["val"]
        self._train = None if train is None else float(train)
        self._val = None if val is None else float(val)


def evaluation_metrics(newest: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation; a metric without a value is absent."""
    values = {
        "evaluation/train_loss": newest.train_loss,
        "evaluation/val_loss": newest.val_loss,
        "evaluation/improvement_rate": newest.improvement,
        "evaluation/train_val_gap": newest.gap,
        "evaluation/plateau_detected": float(newest.unchanged >= PLATEAU),
    }
    return {tag: value for tag, value in values.items() if value is not None}


def _improvement(before: float | None, now: float | None) -> float | None:
    if before is None or now is None or not before > 0 or not math.isfinite(now):
        return None
    return (before - now) / before


def _mean(column: NDArray[np.float64]) -> float | None:
    """Return the mean over the ranks that reported a number; None when none did."""
    given = column[~np.isnan(column)]
    return float(given.mean()) if given.size else None
