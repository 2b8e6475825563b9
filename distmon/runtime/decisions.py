"""What rank 0 has decided, sent so that all ranks act on it at the same step.

Only with actions that need it. At fixed steps after an observation (1, 2, 3, 4, 8, 16, ... steps
later, and at the next one) all ranks launch a small exchange. A decision is proposed in one of them
and takes effect at the same one on all ranks (`proposals.py`). No rank waits for another one unless
it knows that something was decided, then at most `patience_s`, and not for a rank that has ended.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from distmon.reduce.channel import Pending
from distmon.reduce.process_group import Ranks
from distmon.reduce.rank_wait import RankWait
from distmon.rules.alert import Alert
from distmon.runtime.proposals import Proposals

PATIENCE_S: Final = 5.0
"""Longest wait for what other ranks have sent already, where steps are short."""
_STEPS_OF_PATIENCE: Final = 8
"""Ranks whose steps are long, or that synchronize every few steps only, are so far apart."""
_EVERY_STEP: Final = 4
"""So many steps after an observation have an exchange each; then those that are powers of two."""
_BYTES: Final = 8192
_TUPLES: Final = ("params", "layers", "ranks", "advice")


def patience_s(longest_step_s: float, timeout_s: float) -> float:
    """Return how long to wait for an exchange that another rank may launch some steps later.

    Well below the timeout of the group, after which it fails anyway.
    """
    return max(PATIENCE_S, min(_STEPS_OF_PATIENCE * longest_step_s, timeout_s / 4))


@dataclass(frozen=True)
class Decision:
    """Alerts to act on, on every rank."""

    alerts: tuple[Alert, ...] = ()
    """Those for `on_alert`, where it is called on all ranks."""
    checkpoint: Alert | None = None
    stop: Alert | None = None

    def __bool__(self) -> bool:
        return bool(self.alerts) or self.checkpoint is not None or self.stop is not None

    def merged(self, later: Decision) -> Decision:
        """Return both in one."""
        return Decision(
            (*self.alerts, *later.alerts),
            self.checkpoint or later.checkpoint,
            self.stop or later.stop,
        )


@dataclass(frozen=True)
class _Exchange:
    number: int
    numbers: torch.Tensor
    """How many ranks acknowledge the last proposal, and the bytes of a new one."""
    pending: Pending


class Decisions:
    """Exchanges the decisions of rank 0 at fixed steps."""

    def __init__(self, ranks: Ranks, enabled: bool) -> None:
        self.enabled = enabled
        self._channel = ranks.decisions
        self._progress = ranks.progress
        self._rank, self._size = ranks.rank, ranks.size
        self._decided = Decision()
        self._is_proposed = False
        self._proposals = Proposals[bytes]()
        self._number = 0
        self._in_flight: deque[_Exchange] = deque()

    def is_point(self, steps_since_observation: int, observed: bool) -> bool:
        """Return whether the exchange takes place at this step."""
        steps = steps_since_observation
        return self.enabled and (observed or steps <= _EVERY_STEP or steps & (steps - 1) == 0)

    def decide(self, decision: Decision) -> None:
        """Rank 0: send `decision` with the next exchange."""
        if self.enabled:
            self._decided = self._decided.merged(decision)

    def exchange(self, patience: float) -> Decision:
        """Launch the next exchange; return the decision that is in effect from it on.

        Raises CollectiveError when it is known that something was decided, and not within
        `patience` seconds whether all ranks know it, or as soon as a rank has ended.
        """
        number = self._number = self._number + 1
        with RankWait(patience, self._progress, "the answer to a decision") as wait:
            wait.until(lambda: self._is_open(number))
        effective = self._proposals.take(number)
        numbers = torch.zeros(1 + _BYTES // 4, dtype=torch.int32)
        numbers[0] = self._proposals.known is not None
        self._is_proposed &= effective is None
        if self._rank == 0 and self._decided and not self._is_proposed:
            raw = _encode(self._decided)
            numbers[1:].view(torch.uint8)[: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
            self._decided, self._is_proposed = Decision(), True
        pending = self._channel.launch((numbers, dist.ReduceOp.SUM))
        self._in_flight.append(_Exchange(number, numbers, pending))
        return _decode(effective) if effective else Decision()

    def _is_open(self, number: int) -> bool:
        """Return whether all is known that this rank must know at exchange `number`."""
        self.receive()
        return not self._proposals.must_wait(number)

    def receive(self) -> None:
        """Take in the exchanges that have arrived."""
        while self._in_flight and self._in_flight[0].pending.done():
            first = self._in_flight.popleft()
            first.pending.join()
            raw = first.numbers[1:].numpy().tobytes().rstrip(b"\0")
            self._proposals.arrive(first.number, raw or None, int(first.numbers[0]) == self._size)

    @property
    def in_flight(self) -> int:
        """Number of exchanges that have not arrived."""
        return len(self._in_flight)

    def meet(self, seconds: float) -> None:
        """Return when all ranks have called this; CollectiveError when not all will."""
        met = self._channel.launch((torch.zeros(1), dist.ReduceOp.SUM))
        with RankWait(seconds, self._progress, "the meeting of all ranks") as wait:
            wait.until(met.done)


def _encode(decision: Decision) -> bytearray:
    """Return JSON that fits the buffer: without advice, then with fewer alerts, if it must."""
    raw = bytearray()
    for short, most_alerts in ((False, None), (True, None), (True, 4), (True, 0)):
        row = {
            "alerts": [_row(alert, short) for alert in decision.alerts[:most_alerts]],
            "checkpoint": _row(decision.checkpoint, short),
            "stop": _row(decision.stop, short),
        }
        raw = bytearray(json.dumps(row, default=_plain).encode())
        if len(raw) <= _BYTES:
            return raw
    # What counts: that it is to be stopped or saved.
    bare = {
        name: alert and _row(replace(alert, params=(), layers=(), message=""), True)
        for name, alert in (("checkpoint", decision.checkpoint), ("stop", decision.stop))
    }
    return bytearray(json.dumps({"alerts": [], **bare}, default=_plain).encode())


def _plain(value: Any) -> Any:
    """Return a number of numpy's, which a rule of the user's may measure, as one of Python's."""
    return value.item() if hasattr(value, "item") else str(value)


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
