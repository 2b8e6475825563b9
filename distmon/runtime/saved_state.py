"""The monitor's state in a checkpoint, sorted by the part that owns it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distmon.runtime.assembly import Parts
from distmon.runtime.state import STATE_VERSION, state_hash, upgrade


class SavedState:
    """Collects the state of the parts, and gives it back to them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._last: dict[str, Any] = {}

    def collect(self) -> dict[str, Any]:
        """Return the state of all parts; waits a moment for what is being evaluated."""
        parts = self._parts
        cycle = parts.cycle.state_dict()
        self._last = {
            "version": STATE_VERSION,
            "schedule": parts.schedule.state_dict(),
            "finite_watch": parts.finite_watch.state_dict(),
            "cost": parts.cost.state_dict(),
            "cycle": cycle,
        }
        return dict(self._last)

    def last(self) -> dict[str, Any]:
        """Return what `collect` returned last; raises RuntimeError before its first call."""
        if not self._last:
            raise RuntimeError("state_dict was called on another thread than step, and only there")
        return dict(self._last)

    def load(self, state: Mapping[str, Any]) -> None:
        """Give a state to the parts, and raise when it cannot be read: they are then as before."""
        before = self.collect()
        try:
            self._give(upgrade(state))
            self._parts.cycle.run_start.loaded_state = state_hash(state)
        except Exception:
            self._give(before)
            raise

    def _give(self, state: Mapping[str, Any]) -> None:
        parts = self._parts
        parts.cycle.worker.settle()
        parts.cycle.change_interval(parts.cost.load_state_dict(state["cost"]))
        parts.schedule.load_state_dict(state["schedule"])
        parts.finite_watch.load_state_dict(state["finite_watch"])
        parts.cycle.load_state_dict(state["cycle"])
