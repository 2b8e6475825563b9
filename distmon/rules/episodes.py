"""Patience, cooldown and episodes: when a finding becomes an alert, and when it is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Set
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from distmon.rules.base import Finding, Memory

CALM: Final = 3
"""Observations in a row without a finding that end an episode."""
MAX_COOLDOWNS: Final = 8
"""Maximum number of cooldowns between two alerts of an episode; it doubles from 1."""


@dataclass
class Track:
    """State of one key of one rule, from its first finding to the end of its last cooldown."""

    streak: int = 0
    """Observations in a row with a finding."""
    calm: int = 0
    """Observations in a row without a finding."""
    alerts: int = 0
    """Alerts in the current episode; 0 outside an episode."""
    gravity: int = -1
    """Highest severity index of these alerts (0 info, 1 warning, 2 critical)."""
    last: int | None = None
    """The observation of the newest alert, of this or an earlier episode."""


@dataclass
class RuleState:
    """State of one rule; all of it is JSON-serializable."""

    observation: int = 0
    """Number of records on which the rule was evaluated."""
    tracks: dict[str, Track] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether an episode goes on: what was alerted of is still found."""
        return any(track.alerts and not track.calm for track in self.tracks.values())

    def follow(self, found: Mapping[str, Finding], unmeasured: Set[str], cooldown: int) -> None:
        """Update streaks and calm observations, and delete tracks whose cooldown is over.

        Keys that were not measured keep their counts. A fading finding keeps an episode open.
        """
        for key, track in [*self.tracks.items()]:
            if key in found or key in unmeasured:
                continue
            track.streak = 0
            track.calm += 1
            if track.calm >= CALM:
                track.alerts, track.gravity = 0, -1
            cooling = track.last is not None and self.observation <= track.last + cooldown
            if not track.alerts and not cooling:
                del self.tracks[key]
        for key, finding in found.items():
            if not finding.fading:
                track = self.tracks.setdefault(key, Track())
                track.streak += 1
                track.calm = 0
            elif key in self.tracks:
                self.tracks[key].calm = 0

    def has_alerted(self, key: str, severity: int) -> bool:
        """Return whether this episode has had an alert of this severity or a higher one."""
        track = self.tracks[key]
        return track.alerts > 0 and track.gravity >= severity

    def due(self, key: str, patience: int, cooldown: int, severity: int, is_new: bool) -> bool:
        """Return whether a finding becomes an alert now; if so, count the alert."""
        track = self.tracks[key]
        pause = cooldown * min(MAX_COOLDOWNS, 2 ** max(0, track.alerts - 1))
        cooled_down = track.last is None or self.observation > track.last + pause
        more_severe = track.alerts > 0 and severity > track.gravity
        if track.streak < patience or not (cooled_down or more_severe or is_new):
            return False
        track.alerts += 1
        track.gravity = max(track.gravity, severity)
        track.last = self.observation
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the state in plain values."""
        return {
            "observation": self.observation,
            "tracks": {key: asdict(track) for key, track in self.tracks.items()},
            "memory": deepcopy(self.memory),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RuleState:
        """Restore a state that `to_dict` returned."""
        tracks = {key: Track(**_numbers(track)) for key, track in saved["tracks"].items()}
        return cls(int(saved["observation"]), tracks, dict(deepcopy(saved["memory"])))


def _numbers(track: Mapping[str, Any]) -> dict[str, Any]:
    """Raise on a track that holds anything but whole numbers."""
    return {name: None if value is None else int(value) for name, value in track.items()}
