"""Presets of the rules: `rules: absolute`, or `rules: {preset: absolute, frozen: ...}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RULE_PRESETS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "scale_free": {},
    "absolute": {
        "grad_norm_high": {"warning": 100, "critical": 1000},
        "grad_norm_low": {"enabled": True},
        "grad_norm_decay": {"below": 0.3},
        "grad_imbalance": {"exploding": 100},
        "gain_absolute": {"limit": 1.3, "min_blocks": 2},
        "gain_drift": {"min_blocks": 2, "alone": 0.1},
        "update_ratio_high": {"ratio": 0.1},
        "update_ratio_phase": {"enabled": True},
    },
}
"""Settings by preset and rule. The absolute numbers fit language models of usual loss and size."""


def with_preset(value: Any) -> Any:
    """Return rule settings with their preset filled in; the user's own settings win."""
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, Mapping) or "preset" not in value:
        return value
    name = value["preset"]
    if name not in RULE_PRESETS:
        raise ValueError(f"it must be one of {', '.join(RULE_PRESETS)}, or settings by rule")
    own = {rule: settings for rule, settings in value.items() if rule != "preset"}
    merged: dict[str, Any] = {rule: {**given} for rule, given in RULE_PRESETS[name].items()}
    for rule, settings in own.items():
        below = merged.get(rule, {})
        merged[rule] = {**below, **settings} if isinstance(settings, Mapping) else settings
    return merged
