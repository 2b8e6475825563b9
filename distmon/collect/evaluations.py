"""Validation losses that the trainer reported and no record holds yet."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from distmon.collect.losses import Arriving, Number
from distmon.metrics import PENDING_EVALUATIONS


class PendingEvaluations:
    """The newest evaluations that `Monitor.evaluated` took since the last observation."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, float, Arriving, Arriving]] = deque(
            maxlen=PENDING_EVALUATIONS
        )
        self._sent: dict[int, list[tuple[int, float, float, float]]] = {}
        """By the number of the observation in flight."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, step: int, epoch: float | None, train_loss: Number | None, val_loss: Number
    ) -> None:
        """Add one evaluation; its losses are read when it is sent."""
        given = math.nan if train_loss is None else train_loss
        number = math.nan if epoch is None else float(epoch)
        self._waiting.append((max(1, step), number, Arriving(given), Arriving(val_loss)))

    def take(self, number: int) -> dict[str, float]:
        """Return the waiting evaluations as slot fields of observation `number`.

        They stay in the state until it has `arrived`.
        """
        sent = self._read()
        self._sent[number] = sent
        self._waiting.clear()
        slots: dict[str, float] = {}
        for i, (step, epoch, train_loss, val_loss) in enumerate(sent):
            slots[f"eval{i}_step"] = float(step)
            slots[f"eval{i}_epoch"] = epoch
            slots[f"eval{i}_train_loss"] = train_loss
            slots[f"eval{i}_val_loss"] = val_loss
        return slots

    def there(self) -> bool:
        """Return whether `take` waits for no device."""
        return all(a.there() and b.there() for _, _, a, b in self._waiting)

    def drop_absent(self) -> int:
        """Forget the evaluations whose losses are still on a device. Return how many."""
        kept = [row for row in self._waiting if row[2].there() and row[3].there()]
        dropped = len(self._waiting) - len(kept)
        self._waiting.clear()
        self._waiting.extend(kept)
        return dropped

    def arrived(self, number: int) -> None:
        """Forget what was taken up to observation `number`: a record has it now."""
        self._sent = {at: sent for at, sent in self._sent.items() if at > number}

    def to_list(self) -> list[list[float | None]]:
        """Return the evaluations that no record has, for a checkpoint. Waits for the device."""
        rows = [*(row for sent in self._sent.values() for row in sent), *self._read()]
        return [[None if math.isnan(value) else value for value in row] for row in rows]

    def restore(self, rows: Sequence[Sequence[float | None]]) -> None:
        """Restore what `to_list` returned. Call it on every rank, so that their mean is equal."""
        self._waiting.clear()
        for step, epoch, train_loss, val_loss in rows:
            self.add(int(step or 0), epoch, train_loss, math.nan if val_loss is None else val_loss)

    def _read(self) -> list[tuple[int, float, float, float]]:
        return [(step, epoch, a.read(), b.read()) for step, epoch, a, b in self._waiting]
