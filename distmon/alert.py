"""An alert: what is wrong, where, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True)
class Alert:
    """One finding of one rule at one step, ready for a person to read."""

    rule: str
    severity: Severity
    step: int
    message: str
    """What was measured, against which threshold, in one or two sentences."""
    params: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()
    """Things to try, most promising first; shown numbered."""
    measured: float | None = None
    threshold: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able form, as written to `alerts.jsonl`."""
        return asdict(self)
