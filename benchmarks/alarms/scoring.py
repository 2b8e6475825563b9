"""Score the rules on recorded runs, healthy and failing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.table import Table

from benchmarks.alarms.scenarios import TOO_HIGH, Expectation, Scenario
from distmon.record.record import Record
from distmon.replay import Replay, replay_run
from distmon.rules.alert import Alert

CORPUS = Path(__file__).resolve().parents[2] / "tests/runs"
LEAD = 5
"""Steps that a warning has to come before a NaN."""
ALARM_SHARE = 0.05
"""Warnings and worse per observation that a healthy run has to stay below."""


@dataclass(frozen=True)
class Score:
    """How the rules did on one run."""

    scenario: Scenario
    replay: Replay
    named: Alert | None
    """The alert that names the planted fault."""
    nonfinite_at: int | None
    """The first step with a NaN or Inf."""
    foretold_by: Alert | None
    """The first warning before it."""

    @property
    def alerts(self) -> Sequence[Alert]:
        """All of them, of any severity."""
        return self.replay.alerts

    @property
    def share(self) -> float:
        """Alarms per observation: warnings and worse. A hint at level info is none."""
        return len(self.replay.alarms) / max(1, self.replay.observations)

    @property
    def lead(self) -> int | None:
        """Steps from the first warning to the first NaN."""
        if self.nonfinite_at is None or self.foretold_by is None:
            return None
        return self.nonfinite_at - self.foretold_by.step

    @property
    def misses(self) -> list[str]:
        """What is required and missing, in words."""
        found = [f"{f.rule} failed {f.count}x: {f.error}" for f in self.replay.failures]
        if self.scenario.expected is None:
            critical = sorted({a.rule for a in self.alerts if a.severity == "critical"})
            if critical:
                found.append(f"critical {', '.join(critical)} on a healthy run")
            if self.share >= ALARM_SHARE:
                found.append(f"{self.share:.1%} alarms on a healthy run")
        elif self.named is None:
            found.append(_explain_miss(self.scenario.expected, self.alerts))
        if (self.nonfinite_at is None) != (self.scenario.nan == "never"):
            found.append(f"NaN at step {self.nonfinite_at} is not what this run is made for")
        elif self.scenario.nan == "coming" and (self.lead or 0) < LEAD:
            found.append(f"NaN at step {self.nonfinite_at} foretold {self.lead or 0} steps before")
        return found


def score(scenario: Scenario, corpus: Path = CORPUS) -> Score:
    """Replay one recording with the rules as they are."""
    replay = replay_run(corpus / scenario.name)
    nonfinite_at = _first_nonfinite(replay.records)
    named = foretold_by = None
    if scenario.expected:
        named = next((a for a in replay.alerts if names_fault(a, scenario.expected)), None)
    if nonfinite_at is not None:
        warned = (a for a in replay.alarms if a.rule in TOO_HIGH and a.step < nonfinite_at)
        foretold_by = next(warned, None)
    return Score(scenario, replay, named, nonfinite_at, foretold_by)


def _first_nonfinite(records: Iterable[Record]) -> int | None:
    for record in records:
        steps = [step for step, loss in record.losses.items() if not math.isfinite(loss)]
        if record.nonfinite:
            steps.append(record.nonfinite.step)
        if steps:
            return min(steps)
    return None


def names_fault(alert: Alert, expected: Expectation) -> bool:
    """Return whether an alert is the one that is expected."""
    return (
        alert.rule in expected.rules
        and expected.steps[0] <= alert.step <= expected.steps[1]
        and expected.words in alert.message
        and (not expected.place or any(fnmatchcase(p, expected.place) for p in places_of(alert)))
    )


def places_of(alert: Alert) -> list[str]:
    """Return the parameters, layers and ranks that an alert names."""
    return [*alert.params, *alert.layers, *(f"rank {rank}" for rank in alert.ranks)]


def _explain_miss(expected: Expectation, alerts: Iterable[Alert]) -> str:
    """Return the nearest alerts, so that one knows where to look."""
    begin, end = expected.steps
    wanted = f"{'|'.join(expected.rules)} at {expected.place or 'any place'}"
    wanted += f" in steps {begin}-{end}" * (expected.steps != (1, 10**9))
    near = [f"{a.rule} at {a.step}" for a in alerts if a.rule in expected.rules]
    return f"no {wanted}" + (f"; only {', '.join(near[:3])}" if near else "")


def table_of(scores: Sequence[Score]) -> Table:
    """Return a table with one line per run."""
    table = Table(title="the rules on recorded runs", show_footer=True)
    healthy = [each for each in scores if each.scenario.expected is None]
    failing = [each for each in scores if each.scenario.expected is not None]
    missed = sum(bool(each.misses) for each in scores)
    observed = sum(each.replay.observations for each in scores)
    quiet = sum(each.replay.observations for each in healthy)
    said = sum(len(each.replay.alarms) for each in healthy)
    table.add_column("run", footer=f"{len(healthy)} healthy, {len(failing)} failing")
    table.add_column("observations", justify="right", footer=str(observed))
    for severity in ("critical", "warning", "info"):
        count = sum(each.replay.by_severity()[severity] for each in scores)
        table.add_column(severity, justify="right", footer=str(count))
    table.add_column("alarms", justify="right", footer=f"{said / quiet:.1%}" if quiet else "")
    table.add_column("first alert")
    named = sum(each.named is not None for each in failing)
    table.add_column("named by", footer=f"{named} of {len(failing)}")
    table.add_column("NaN at", justify="right")
    leads = [each.lead or 0 for each in scores if each.scenario.nan == "coming"]
    table.add_column("warned", justify="right", footer=f">= {min(leads)}" if leads else "")
    table.add_column("missed", footer=f"{missed} runs" if missed else "nothing")
    for each in [*healthy, *failing]:
        table.add_row(*_row(each), style="red" if each.misses else None)
    return table


def _row(score: Score) -> list[str]:
    counts = score.replay.by_severity()
    first = score.alerts[0] if score.alerts else None
    lead = "" if score.lead is None else f"{score.lead} before"
    return [
        score.scenario.name,
        str(score.replay.observations),
        *(str(counts[severity] or "") for severity in ("critical", "warning", "info")),
        "" if score.scenario.expected else f"{score.share:.1%}",
        f"{first.rule} at {first.step}" if first else "",
        _named(score.named) if score.named else "",
        "" if score.nonfinite_at is None else str(score.nonfinite_at),
        lead if score.scenario.nan == "coming" else "",
        "; ".join(score.misses),
    ]


def _named(alert: Alert) -> str:
    places = places_of(alert)
    where = (
        f", {places[0]}" + (f" and {len(places) - 1} more" * (len(places) > 1)) if places else ""
    )
    return f"{alert.rule} at {alert.step}{where}"
