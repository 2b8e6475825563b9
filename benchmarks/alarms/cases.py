"""A run of the second corpus: its kind, how it is built, and the alert that it has to have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.alarms.kinds.setup import Fault, Setup
from benchmarks.alarms.scenarios import Expectation

Half = Literal["tuning", "held_back", "blind", "unseen", "audit", "sealed"]
HALVES: tuple[Half, ...] = ("tuning", "held_back", "blind", "unseen", "audit", "sealed")
SPLIT = Path(__file__).with_name("split.json")


def halves() -> dict[str, Half]:
    """Return the set of each kind, as it was fixed before the rules were tuned."""
    content = json.loads(SPLIT.read_text())
    return {kind: half for half in HALVES for kind in content[half]}


@dataclass(frozen=True)
class Case:
    """One run of a few hundred steps."""

    name: str
    kind: str
    build: Callable[[int], Setup]
    """Builds the setup from a seed."""
    steps: int = 300
    interval: int = 10
    fault: Callable[[], Fault] = Fault
    expected: Expectation | None = None
    """None: the run is healthy."""
    has_signal: bool = True
    """False for a fault that leaves no trace in what is measured; it is counted apart."""
    causes: tuple[str, ...] = ()
    """Words of which the advice or message has to contain one, to have named the cause."""
    ranks: int = 1

    @property
    def half(self) -> Half:
        """The set that its kind belongs to."""
        return halves()[self.kind]
