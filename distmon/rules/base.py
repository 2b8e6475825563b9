"""What a rule is: a small function of a record, with named thresholds and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from distmon.alert import Severity
from distmon.record import Record

Limits = Mapping[str, float]
"""Threshold values by name, as configured."""
Memory = dict[str, Any]
"""What a rule remembers from record to record; JSON-able, saved with the checkpoint."""

MARGIN: Final = 0.1
"""How far inside its limit, as a share of it, a value has to be before its finding is over."""


@dataclass(frozen=True)
class Threshold:
    """One number that a user may tune."""

    value: float
    help: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong in this record. Patience and cooldown are counted per `key`."""

    key: str
    message: str
    group: str = ""
    """Findings of one group become one alert."""
    params: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    """Besides the layers of `params`."""
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()
    """Replaces the rule's own advice when it fits better."""
    severity: Severity | None = None
    """Replaces the rule's own severity."""
    measured: float | None = None
    threshold: float | None = None
    fading: bool = False
    """Back inside the limit, but by less than MARGIN: raises nothing, ends nothing."""
    is_new: bool = False
    """Known not to be what was told before: fires in spite of the cooldown."""


def tell_first(findings: Sequence[Finding]) -> str:
    """The message of a rule that finds one thing at a time."""
    return findings[0].message


@dataclass(frozen=True)
class Rule:
    """A rule with its defaults. `check` is pure but for the memory it is handed."""

    name: str
    summary: str
    """When it fires, in words."""
    check: Callable[[Record, Limits, Memory], Iterable[Finding]]
    severity: Severity
    advice: tuple[str, ...]
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    patience: int = 1
    cooldown: int = 10
    needs: tuple[str, ...] = ()
    """Parts of a record (`params`, `flow`, `evaluations`, `tasks`, or the tag of a metric), one of
    which has to be there: without, the record is no observation for this rule."""
    tell: Callable[[Sequence[Finding]], str] = tell_first
    """Puts the findings of one group into one message."""


def metric(record: Record, tag: str) -> float | None:
    """The value of a metric; None where there is none or it is not finite."""
    value = record.metrics.get(tag)
    return value if value is not None and isfinite(value) else None


def name_some(names: Sequence[str], most: int = 5) -> str:
    """`a, b and 3 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def layer_of(param: str) -> str:
    """`blocks.2.mlp.up.weight` -> `blocks.2`; a parameter outside a list -> its module."""
    parts = param.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or param
