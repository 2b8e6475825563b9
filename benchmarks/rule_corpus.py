"""How well the rules do on recorded runs, healthy and failing; one command prints the table.

    python benchmarks/rule_corpus.py                    # replay tests/runs with the present rules
    python benchmarks/rule_corpus.py --verbose          # and list every alert
    python benchmarks/rule_corpus.py --make             # train all runs again
    python benchmarks/rule_corpus.py --make nan-sgd     # or some
    python benchmarks/rule_corpus.py --make --seed 1 --corpus /tmp/unseen

The last trains the same scenarios with other weights and data, elsewhere: rules that were tuned on
the corpus have to do as well on runs that nobody has looked at.

Required of the rules: each planted fault is named, at its place and in time; a run that reaches NaN
by itself has a warning of the gain, gradient, update-ratio or loss rules at least 5 steps before;
a healthy run has alerts in less than 5% of its observations and no critical one. Exit code 1 when
something is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rule_scenarios import SCENARIOS, TOO_HIGH, Expectation, Scenario

from distmon.alert import Alert
from distmon.record import Record
from distmon.replay import Replay, replay_run

CORPUS = Path(__file__).resolve().parents[1] / "tests/runs"
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
        """What is required and not so, in words."""
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
        named = next((a for a in replay.alerts if _names(a, scenario.expected)), None)
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


def _names(alert: Alert, expected: Expectation) -> bool:
    return (
        alert.rule in expected.rules
        and expected.steps[0] <= alert.step <= expected.steps[1]
        and expected.words in alert.message
        and (not expected.place or any(fnmatchcase(p, expected.place) for p in _places(alert)))
    )


def _places(alert: Alert) -> list[str]:
    return [*alert.params, *alert.layers, *(f"rank {rank}" for rank in alert.ranks)]


def _explain_miss(expected: Expectation, alerts: Iterable[Alert]) -> str:
    """The nearest thing that was said, so that one knows where to look."""
    begin, end = expected.steps
    wanted = f"{'|'.join(expected.rules)} at {expected.place or 'any place'}"
    wanted += f" in steps {begin}-{end}" * (expected.steps != (1, 10**9))
    near = [f"{a.rule} at {a.step}" for a in alerts if a.rule in expected.rules]
    return f"no {wanted}" + (f"; only {', '.join(near[:3])}" if near else "")


def table_of(scores: Sequence[Score]) -> Table:
    """One row per run."""
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
        _told(score.named) if score.named else "",
        "" if score.nonfinite_at is None else str(score.nonfinite_at),
        lead if score.scenario.nan == "coming" else "",
        "; ".join(score.misses),
    ]


def _told(alert: Alert) -> str:
    places = _places(alert)
    where = (
        f", {places[0]}" + (f" and {len(places) - 1} more" * (len(places) > 1)) if places else ""
    )
    return f"{alert.rule} at {alert.step}{where}"


def make(scenarios: Sequence[Scenario], corpus: Path, seed: int, console: Console) -> None:
    """Train and record again."""
    from rule_recording import record

    begun = time.perf_counter()
    # Each run is a process of its own with one thread.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        folders = pool.map(lambda scenario: record(scenario, corpus, seed), scenarios)
        for scenario, folder in zip(scenarios, folders, strict=True):
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e3
            console.print(f"{scenario.name}: {scenario.about} ({size:.0f} kB)")
    total = sum(file.stat().st_size for file in corpus.glob("*/*")) / 1e6
    console.print(f"{time.perf_counter() - begun:.0f} s; the corpus has {total:.1f} MB")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; all of them when absent")
    parser.add_argument("--make", action="store_true", help="train and record the runs first")
    parser.add_argument("--verbose", action="store_true", help="list every alert")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data with --make")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where the recordings are")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"no run is called {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a log has no width of its own; the default cuts the table
    scenarios = [SCENARIOS[name] for name in asked.names] or [*SCENARIOS.values()]
    if asked.make:
        make(scenarios, asked.corpus, asked.seed, console)
    scores = [score(each, asked.corpus) for each in scenarios]
    console.print(table_of(scores))
    if asked.verbose:
        for each in scores:
            for alert in each.alerts:
                where = f" [{', '.join(_places(alert)[:4])}]" if _places(alert) else ""
                text = f"{each.scenario.name} {alert.step} {alert.severity} {alert.rule}{where}: "
                console.print(text + alert.message, markup=False, highlight=False)
    return 1 if any(each.misses for each in scores) else 0


if __name__ == "__main__":
    sys.exit(main())
