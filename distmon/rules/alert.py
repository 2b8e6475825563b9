"""An alert: what is wrong, where, and what to try."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True)
class Alert:
    """One or more findings of one rule at one step, formatted for a reader."""

    rule: str
    severity: Severity
    step: int
    message: str
    """What was measured and which threshold it crossed, in one or two sentences."""
    params: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()
    """Things to try, most promising first; printed as a numbered list."""
    measured: float | None = None
    threshold: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, as written to `alerts.jsonl`."""
        return asdict(self)
