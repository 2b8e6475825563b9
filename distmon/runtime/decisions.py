"""What rank 0 has decided, sent so that all ranks act on it at the same step.

Only with actions that need it. At fixed steps after an observation (1, 2, 4, 8, ... steps later,
and at the next one) all ranks launch a small exchange that carries the alerts to act on; at the
next such step they act on it. A rank waits there only when the exchange has not arrived yet, at
most `PATIENCE_S`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from distmon.errors import CollectiveError
from distmon.reduce.channel import Channel, Pending
from distmon.rules.alert import Alert

PATIENCE_S: Final = 5.0
"""Longest wait for rank 0's evaluation, and for an exchange that has not arrived."""
_BYTES: Final = 8192
_TUPLES: Final = ("params", "layers", "ranks", "advice")


@dataclass(frozen=True)
class Decision:
    """Alerts to act on, on every rank."""

    alerts: tuple[Alert, ...] = ()
    """Those for `on_alert`, where it is called on all ranks."""
    checkpoint: Alert | None = None
    stop: Alert | None = None

    def __bool__(self) -> bool:
        return bool(self.alerts) or self.checkpoint is not None or self.stop is not None


class Decisions:
    """Exchanges the decisions of rank 0 at fixed steps."""

    def __init__(self, channel: Channel, rank: int, enabled: bool) -> None:
        self.enabled = enabled
        self._channel = channel
        self._rank = rank
        self._decided = Decision()
        self._buffer = torch.zeros(_BYTES, dtype=torch.uint8)
        self._pending: Pending | None = None
        self._point = 0

    def is_point(self, steps_since_observation: int, observed: bool) -> bool:
        """Return whether the exchange takes place at this step; call it once in every step.

        `observed`: this step is observed, which begins a new count.
        """
        if not self.enabled:
            return False
        before, self._point = self._point, steps_since_observation.bit_length()
        return observed or self._point != before

    def decide(self, decision: Decision) -> None:
        """Rank 0: send `decision` with the next exchange."""
        if self.enabled:
            waiting = self._decided
            self._decided = Decision(
                (*waiting.alerts, *decision.alerts),
                waiting.checkpoint or decision.checkpoint,
                waiting.stop or decision.stop,
            )

    def exchange(self) -> Decision:
        """Return the decision of the last exchange, and launch the next one.

        Raises CollectiveError when the last one has not arrived in time.
        """
        found = self._receive()
        self._buffer.zero_()
        if self._rank == 0 and self._decided:
            raw = _encode(self._decided)
            self._decided = Decision()
            self._buffer[: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
        self._pending = self._channel.launch((self._buffer, dist.ReduceOp.SUM))
        return found

    def _receive(self) -> Decision:
        if self._pending is None:
            return Decision()
        if not self._pending.wait(PATIENCE_S):
            raise CollectiveError(f"the decision of rank 0 did not arrive within {PATIENCE_S:g} s")
        self._pending.join()
        self._pending = None
        raw = self._buffer.numpy().tobytes().rstrip(b"\0")
        return _decode(raw) if raw else Decision()

    def meet(self, seconds: float) -> None:
        """Return when all ranks have called this, or after `seconds`."""
        mark = torch.zeros(1)
        self._channel.launch((mark, dist.ReduceOp.SUM)).wait(seconds)


def _encode(decision: Decision) -> bytearray:
    """Return JSON that fits the buffer: without advice, then with fewer alerts, if it must."""
    for short, most_alerts in ((False, None), (True, None), (True, 4), (True, 0)):
        row = {
            "alerts": [_row(alert, short) for alert in decision.alerts[:most_alerts]],
            "checkpoint": _row(decision.checkpoint, short),
            "stop": _row(decision.stop, short),
        }
        raw = bytearray(json.dumps(row).encode())
        if len(raw) <= _BYTES:
            break
    return raw


def _row(alert: Alert | None, short: bool) -> dict[str, Any] | None:
    if alert is None:
        return None
    row = alert.to_dict()
    if short:
        row |= {name: row[name][:8] for name in ("params", "layers", "ranks")}
        row |= {"advice": (), "message": alert.message[:300], "rule": alert.rule[:100]}
        row |= {name: [text[:60] for text in row[name]] for name in ("params", "layers")}
    return row


def _decode(raw: bytes) -> Decision:
    row = json.loads(raw)
    return Decision(
        alerts=tuple(filter(None, map(_alert, row["alerts"]))),
        checkpoint=_alert(row["checkpoint"]),
        stop=_alert(row["stop"]),
    )


def _alert(row: dict[str, Any] | None) -> Alert | None:
    if row is None:
        return None
    fields: dict[str, Any] = {k: tuple(v) if k in _TUPLES else v for k, v in row.items()}
    return Alert(**fields)
