"""Patience, cooldown and episodes: when a finding is told, and when it is told again."""

from __future__ import annotations

from collections.abc import Mapping, Set
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from distmon.rules.base import Finding, Memory

CALM: Final = 3
"""Observations in a row without a finding after which its episode is over."""
LONGEST_SILENCE: Final = 8
"""Cooldowns between two reminders, at most; it doubles from one."""


@dataclass
class Track:
    """What is remembered of one key of one rule, while it is found and shortly after."""

    streak: int = 0
    """Observations in a row with a finding."""
    calm: int = 0
    """Observations in a row without one."""
    told: int = 0
    """Alerts of the episode that lasts; 0 when none does."""
    gravity: int = -1
    """Of the gravest of them."""
    last: int | None = None
    """The observation of the newest alert, also of an episode that is over."""


@dataclass
class RuleState:
    """What is remembered of one rule. All of it is JSON-able."""

    observation: int = 0
    """Records so far that had what the rule needs."""
    tracks: dict[str, Track] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)

    def follow(self, found: Mapping[str, Finding], unmeasured: Set[str], cooldown: int) -> None:
        """Count streaks and calm observations, and forget what is over.

        Keys that were not measured stand still. A fading finding keeps what there is alive.
        """
        for key, track in [*self.tracks.items()]:
            if key in found or key in unmeasured:
                continue
            track.streak = 0
            track.calm += 1
            if track.calm >= CALM:
                track.told, track.gravity = 0, -1
            silent = track.last is not None and self.observation <= track.last + cooldown
            if not track.told and not silent:
                del self.tracks[key]
        for key, finding in found.items():
            if not finding.fading:
                track = self.tracks.setdefault(key, Track())
                track.streak += 1
                track.calm = 0
            elif key in self.tracks:
                self.tracks[key].calm = 0

    def due(self, key: str, patience: int, cooldown: int, gravity: int, is_new: bool) -> bool:
        """Whether a finding becomes an alert now; it is then remembered as told."""
        track = self.tracks[key]
        silence = cooldown * min(LONGEST_SILENCE, 2 ** max(0, track.told - 1))
        rested = track.last is None or self.observation > track.last + silence
        graver = track.told > 0 and gravity > track.gravity
        if track.streak < patience or not (rested or graver or is_new):
            return False
        track.told += 1
        track.gravity = max(track.gravity, gravity)
        track.last = self.observation
        return True

    def to_dict(self) -> dict[str, Any]:
        """A copy in plain values."""
        return {
            "observation": self.observation,
            "tracks": {key: asdict(track) for key, track in self.tracks.items()},
            "memory": deepcopy(self.memory),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RuleState:
        """What `to_dict` gave."""
        tracks = {key: Track(**track) for key, track in saved["tracks"].items()}
        return cls(int(saved["observation"]), tracks, deepcopy(saved["memory"]))

    @classmethod
    def from_old(
        cls, saved: Mapping[str, Any], observation: int, cooldown: int, gravity: int
    ) -> RuleState:
        """From a checkpoint of the time when observations were counted for all rules together."""
        tracks = {key: Track(streak=int(n)) for key, n in saved["streak"].items()}
        for key, until in saved["silent_until"].items():
            if until > observation:
                track = tracks.setdefault(key, Track())
                track.told, track.gravity = 1, gravity
                track.last = int(until) - cooldown - 1
        return cls(observation, tracks, deepcopy(saved["memory"]))
