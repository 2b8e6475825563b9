"""A run as `compare` needs it: a run folder, or the log of another tool through `replay`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from distmon.metrics import TOPK_FROZEN_PREFIX
from distmon.record.record import Record
from distmon.replay import find_sources, read_source
from distmon.report.param_history import ParamHistory
from distmon.report.view import flat
from distmon.runs.reader import News, RunTail

Series = dict[int, float]


@dataclass(frozen=True)
class ComparedRun:
    """Numbers by step, and what is known about the run."""

    name: str
    losses: Series
    val_losses: Series
    metrics: Mapping[str, Series]
    tokens: Series
    """Tokens until each observed step; empty where they are unknown."""
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    world_size: int | None = None
    shapes: Mapping[str, str] = field(default_factory=dict)
    history: ParamHistory | None = None
    alerts: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    @property
    def last_step(self) -> int:
        """The last step with a number."""
        return max((max(s) for s in (self.losses, *self.metrics.values()) if s), default=0)


def load_runs(
    paths: Iterable[Path], requested: Mapping[str, str] | None = None
) -> list[ComparedRun]:
    """Read every run at the paths, in their order; names are made unique."""
    found: list[ComparedRun] = []
    for path in paths:
        for source in find_sources(path):
            if source.kind == "run folder":
                found.append(_from_folder(source.path))
            else:
                recordings = read_source(source, requested)
                found += [_from_log(each.name, each.records, each.notes) for each in recordings]
    return found


def _from_folder(path: Path) -> ComparedRun:
    news = RunTail(path).read()
    info = news.info
    history = ParamHistory(info.get("parameters", ()))
    history.add(news.params)
    evaluations = [e for r in news.records for e in r.get("evaluations") or ()]
    attempts = info["attempts"]
    return ComparedRun(
        name=str(path),
        losses=news.losses,
        val_losses={e["step"]: _float(e["val_loss"]) for e in evaluations},
        metrics=_metrics((r["step"], r["metrics"]) for r in news.records if not r.get("partial")),
        tokens=_tokens(news),
        settings=dict(flat(info.get("config", {}))),
        versions=dict(flat(info.get("versions", {}))),
        world_size=attempts[-1].get("world_size") if attempts else None,
        shapes={str(p["name"]): _shape(p) for p in info.get("parameters", ())},
        history=history,
        alerts=news.alerts,
        notes=news.problems,
    )


def _from_log(name: str, records: Sequence[Record], notes: Sequence[str]) -> ComparedRun:
    losses: Series = {}
    for record in records:
        losses |= record.losses
    return ComparedRun(
        name=name,
        losses=losses,
        val_losses={e.step: e.val_loss for r in records for e in r.evaluations},
        metrics=_metrics((record.step, record.metrics) for record in records),
        tokens={},
        notes=notes,
    )


def _metrics(entries: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for step, metrics in entries:
        for tag, value in metrics.items():
            if math.isfinite(value) and not tag.startswith(TOPK_FROZEN_PREFIX):
                found.setdefault(tag, {})[step] = value
    return found


def _tokens(news: News) -> Series:
    """Return the tokens of all ranks until each observation.

    Rates begin after the first step of an attempt, so its tokens are in no record: all steps until
    the first observation of an attempt count with the rate of the next one.
    """
    found: list[tuple[int, int, float]] = []
    for record in news.records:
        given = np.array([_float(value) for value in record.get("ranks", {}).get("tokens", ())])
        if len(given) and np.isfinite(given).all() and given.sum() > 0:
            found.append((int(record.get("attempt") or 0), int(record["step"]), float(given.sum())))
    total, tokens = 0.0, {}
    before: tuple[int, int] = (-1, 0)
    for (attempt, step, count), after in zip_longest(found, found[1:]):
        if attempt != before[0] and after is not None and after[0] == attempt and after[1] > step:
            count = (step - before[1]) * after[2] / (after[1] - step)
        total += count
        tokens[step] = total
        before = attempt, step
    return tokens


def _shape(entry: Mapping[str, Any]) -> str:
    sizes = " x ".join(map(str, entry.get("shape", ())))
    trained = "" if entry.get("requires_grad", True) else ", not trained"
    return f"{sizes} {entry.get('dtype', '')}{trained}".strip()


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)
