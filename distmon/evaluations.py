"""Validation losses on their way into records: packed for the other ranks, compared with before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmon.losses import Arriving, Number
from distmon.metrics import PENDING_EVALUATIONS
from distmon.record import Evaluation

UNCHANGED = 0.01
"""A validation loss that changes by less, relative to the one before, has not changed."""
PLATEAU = 3
"""Evaluations in a row without a change that make a plateau."""


class PendingEvaluations:
    """What `Monitor.evaluated` was told since the last observation; the newest few are kept."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, float, Arriving, Arriving]] = deque(
            maxlen=PENDING_EVALUATIONS
        )
        self._sent: list[tuple[int, float, float, float]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, step: int, epoch: float | None, train_loss: Number | None, val_loss: Number
    ) -> None:
        """Take in one evaluation; it is read when it is sent."""
        given = math.nan if train_loss is None else train_loss
        number = math.nan if epoch is None else float(epoch)
        self._waiting.append((max(1, step), number, Arriving(given), Arriving(val_loss)))

    def take(self) -> dict[str, float]:
        """As telemetry of this rank; they wait no longer, and are on their way until `arrived`."""
        self._sent = self._read()
        self._waiting.clear()
        slots: dict[str, float] = {}
        for i, (step, epoch, train_loss, val_loss) in enumerate(self._sent):
            slots[f"eval{i}_step"] = float(step)
            slots[f"eval{i}_epoch"] = epoch
            slots[f"eval{i}_train_loss"] = train_loss
            slots[f"eval{i}_val_loss"] = val_loss
        return slots

    def arrived(self) -> None:
        """What was taken is in a record now."""
        self._sent = []

    def to_list(self) -> list[list[float | None]]:
        """What no record has yet, for a checkpoint. Waits for the device."""
        rows = [*self._sent, *self._read()]
        return [[None if math.isnan(value) else value for value in row] for row in rows]

    def restore(self, rows: Sequence[Sequence[float | None]]) -> None:
        """Put back what `to_list` gave. On every rank alike, so that their mean is what it was."""
        self._waiting.clear()
        for step, epoch, train_loss, val_loss in rows:
            self.add(int(step or 0), epoch, train_loss, math.nan if val_loss is None else val_loss)

    def _read(self) -> list[tuple[int, float, float, float]]:
        return [(step, epoch, a.read(), b.read()) for step, epoch, a, b in self._waiting]


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
        """The next evaluation of the run. A loss that is not finite is compared with nothing."""
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
        """The evaluations in the telemetry of all ranks, in step order, each the mean over ranks.

        `train_loss` stands in where none was given.
        """
        told: dict[int, list[NDArray[np.float64]]] = {}
        for i in range(PENDING_EVALUATIONS):
            columns = [ranks[f"eval{i}_{w}"] for w in ("step", "epoch", "train_loss", "val_loss")]
            for row in np.stack(columns, axis=1):
                if row[0] > 0:
                    told.setdefault(int(row[0]), []).append(row)
        found = []
        for step, rows in sorted(told.items()):
            _, epoch, train, val = (_mean(column) for column in np.stack(rows, axis=1))
            given = train_loss if train is None else train
            found.append(self.take(step, epoch, given, math.nan if val is None else val))
        return tuple(found)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {
            "number": self._number,
            "train": self._train,
            "val": self._val,
            "unchanged": self._unchanged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._number, self._unchanged = int(state["number"]), int(state["unchanged"])
        self._train, self._val = state["train"], state["val"]


def evaluation_metrics(newest: Evaluation) -> dict[str, float]:
    """What is logged of an evaluation; what is not known is absent."""
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
    """Over the ranks that gave a number; None when none did."""
    given = column[~np.isnan(column)]
    return float(given.mean()) if given.size else None
