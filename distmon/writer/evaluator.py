"""What follows an observation on rank 0: its record, its alerts, and their delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distmon.record.builder import RecordBuilder
from distmon.record.digest import record_hash
from distmon.record.observation import Observation
from distmon.record.record import Record
from distmon.record.telemetry import ObservationCost, observation_cost
from distmon.rules import RuleEngine
from distmon.rules.alert import Alert
from distmon.sinks import Delivery


@dataclass(frozen=True)
class Evaluated:
    """What the training process gets back of one observation."""

    step: int
    alerts: tuple[Alert, ...]
    failures: Mapping[str, Exception] = field(default_factory=dict)
    """Rules and callbacks that failed, by name."""
    faults: tuple[str, ...] = ()
    """Of the record."""
    cost: ObservationCost | None = None
    read_in_full: tuple[int, ...] = ()
    """Parameters whose gradient is read in full at the next observation."""
    hashed: tuple[int, int] = (0, 0)
    """Step and hash of the record, with `check_records`."""
    record: Record | None = None
    """None where nothing in the training process needs it."""


@dataclass(frozen=True)
class Rest:
    """What the trainer reported after the last observation; see `RecordBuilder.partial_record`."""

    step: int
    fields: Mapping[str, float]
    lr: float | None
    losses: Mapping[int, float]
    faults: tuple[str, ...] = ()


class Evaluator:
    """Derives records, evaluates rules and delivers both; the same in a thread and a process."""

    def __init__(
        self, builder: RecordBuilder, rules: RuleEngine, delivery: Delivery, hashed: bool = False
    ) -> None:
        """`hashed`: compute the hash of every record."""
        self.builder = builder
        self.rules = rules
        self.delivery = delivery
        self._hashed = hashed
        self.newest: Record | None = None

    def evaluate(self, observation: Observation) -> Evaluated:
        """Return what follows from an observation, after handing it to the sinks."""
        record = self.builder.build(observation)
        self.newest = record
        return self._conclude(record)

    def finish(self, rest: Rest) -> Evaluated:
        """Deliver what no observation has followed."""
        record = self.builder.partial_record(
            rest.step, rest.fields, rest.lr, rest.losses, rest.faults
        )
        return self._conclude(record)

    def _conclude(self, record: Record) -> Evaluated:
        alerts, failures = self.rules.evaluate(record)
        self.delivery.post(record, alerts)
        return Evaluated(
            step=record.step,
            alerts=tuple(alerts),
            failures={f"rule {name}": error for name, error in failures.items()},
            faults=record.faults,
            cost=observation_cost(record.ranks),
            read_in_full=tuple(int(row) for row in self.builder.read_in_full),
            hashed=(record.step, record_hash(record)) if self._hashed else (0, 0),
            record=record,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"record": self.builder.state_dict(), "rules": self.rules.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], losses: Sequence[float] = ()) -> None:
        """Continue where `state_dict` was taken; `losses` of later steps are averaged at once."""
        self.builder.load_state_dict(state["record"])
        for loss in losses:
            self.builder.ema.update(loss)
        self.rules.load_state_dict(state["rules"])
