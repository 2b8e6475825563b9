"""The parts of a rule: a check function of a record, named thresholds, findings and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

import numpy as np

from distmon.record.record import Column, Record
from distmon.rules.alert import Severity

Limits = Mapping[str, float]
"""Threshold values by name, as configured."""
Memory = dict[str, Any]
"""State of a rule between records; JSON-serializable, saved in the checkpoint."""

MARGIN: Final = 0.1
"""Hysteresis: a finding ends when its value is this fraction of the limit inside the limit."""


@dataclass(frozen=True)
class Threshold:
    """A number that a user may set in `rules.<rule>.<threshold>`."""

    value: float
    help: str


@dataclass(frozen=True)
class Finding:
    """Something wrong in this record. Patience and cooldown are counted per `key`."""

    key: str
    message: str
    group: str = ""
    """Findings of the same group become one alert."""
    params: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    """Layers in addition to those of `params`."""
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()
    """Overrides the rule's advice."""
    severity: Severity | None = None
    """Overrides the rule's severity."""
    measured: float | None = None
    threshold: float | None = None
    fading: bool = False
    """Inside the limit by less than MARGIN: raises no alert, but does not end an episode."""
    once: bool = False
    """Not repeated while its episode lasts, however long: what is most likely meant so."""
    is_new: bool = False
    """Different from the last alert of this key: raises an alert despite the cooldown."""


def first_message(findings: Sequence[Finding]) -> str:
    """Return the message of the first finding."""
    return findings[0].message


@dataclass(frozen=True)
class Rule:
    """A rule with its defaults. `check` is a pure function, except that it updates its memory."""

    name: str
    summary: str
    """When the rule fires, in one line."""
    check: Callable[[Record, Limits, Memory], Iterable[Finding]]
    severity: Severity
    advice: tuple[str, ...]
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    patience: int = 1
    cooldown: int = 10
    needs: tuple[str, ...] = ()
    """Parts of a record (`params`, `gradient_gain`, `evaluations`, `tasks`, the tag of a metric, or
    `ranks.` and a rank metric). The rule is evaluated only on records that have at least one."""
    users: bool = False
    """Whether `check` is a function of the user's, which gets a time limit."""
    enabled: bool = True
    """Whether it is evaluated without being enabled in the settings."""
    combine_messages: Callable[[Sequence[Finding]], str] = first_message
    """Makes one message from the findings of one group."""


def metric(record: Record, tag: str) -> float | None:
    """Return the value of a metric; None when it is missing or not finite."""
    value = record.metrics.get(tag)
    return value if value is not None and isfinite(value) else None


def name_some(names: Sequence[str], most: int = 5) -> str:
    """Join at most `most` names: `a, b and 3 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def layer_of(param: str) -> str:
    """Return the layer of a parameter: `blocks.2` for `blocks.2.mlp.up.weight`.

    Without a number in the name, the layer is the module that holds the parameter.
    """
    parts = param.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or param


def median_of(values: Column) -> float:
    """Return the median of some numbers; `np.median` takes nine times as long for two dozen."""
    ordered, middle = np.sort(values), len(values) // 2
    if len(values) % 2:
        return float(ordered[middle])
    return float(ordered[middle - 1] + ordered[middle]) / 2
