"""Score the rules on the second corpus: the halves that they are tuned on, blind and unseen set."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.alarms.cases import HALVES, Case, Half
from benchmarks.alarms.corpus import CASES, unpack
from benchmarks.alarms.scoring import names_fault
from distmon.record.record import Record
from distmon.replay import Replay, replay_run
from distmon.rules.alert import Alert

TITLES: dict[Half, str] = {
    "tuning": "tuned on, first half",
    "held_back": "tuned on, second half",
    "blind": "blind set",
    "unseen": "unseen set",
    "audit": "audit set",
    "sealed": "sealed set",
}
RAISE = ("double the learning rate", "raise the learning rate", "increase the learning rate")
LOWER = ("halve the learning rate", "lower the learning rate", "reduce the learning rate")
GOALS = {
    "false warnings per healthy run": "<= 0.1",
    "false criticals": "0",
    "infos per healthy run": "<= 0.3",
    "faults named, rule and place": ">= 90%",
    "median delay, observations": "<= 3",
    "contradictory advice": "0",
}


@dataclass(frozen=True)
class CaseScore:
    """How the rules did on one run."""

    case: Case
    replay: Replay
    named: Alert | None
    """The first alert that names the fault."""

    @property
    def begin(self) -> int:
        """The step at which the fault begins."""
        return self.case.expected.steps[0] if self.case.expected else 0

    @property
    def delay(self) -> int | None:
        """Observations from the first one that could have shown the fault to the alert."""
        if self.named is None:
            return None
        steps = [record.step for record in self.replay.records]
        return sum(self.begin <= step < self.named.step for step in steps)

    @property
    def early(self) -> list[Alert]:
        """Warnings before the fault began: false ones."""
        return [a for a in self.replay.alarms if a.step < self.begin]

    @property
    def warned(self) -> bool:
        """Whether an alert above info names the fault."""
        expected, alarms = self.case.expected, self.replay.alarms
        return expected is not None and any(names_fault(alert, expected) for alert in alarms)

    @property
    def names_cause(self) -> bool:
        """Whether message or advice of the alert that names the fault has a word of the cause."""
        if self.named is None:
            return False
        text = " ".join((self.named.message, *self.named.advice))
        return not self.case.causes or any(word in text for word in self.case.causes)

    @property
    def contradictions(self) -> list[int]:
        """Steps at which some advice raises the learning rate and some lowers it."""
        return contradictory_steps(self.replay.alerts)


def contradictory_steps(alerts: Iterable[Alert]) -> list[int]:
    """Return the steps whose alerts advise opposite things."""
    said: dict[int, str] = {}
    for alert in alerts:
        said[alert.step] = said.get(alert.step, "") + "\n".join(alert.advice) + "\n"
    return [
        step
        for step, text in said.items()
        if any(word in text for word in RAISE) and any(word in text for word in LOWER)
    ]


def score_case(case: Case, folder: Path) -> CaseScore:
    """Replay one recording with the rules as they are."""
    replay = replay_run(folder)
    named = None
    if case.expected:
        named = next((a for a in replay.alerts if names_fault(a, case.expected)), None)
    return CaseScore(case, replay, named)


@contextmanager
def recordings(folders: Path | None = None) -> Iterator[Path]:
    """Yield the folder of all recordings: `folders`, or the unpacked archives."""
    if folders is not None:
        yield folders
        return
    with tempfile.TemporaryDirectory() as scratch:
        unpack(Path(scratch))
        yield Path(scratch)


def score_all(folders: Path | None = None, half: Half | None = None) -> list[CaseScore]:
    """Replay all cases, or those of one half."""
    with recordings(folders) as root:
        wanted = [case for case in CASES.values() if half in (None, case.half)]
        return [score_case(case, root / case.name) for case in wanted]


def summary(scores: Sequence[CaseScore]) -> dict[str, str]:
    """Return the figures of some runs by name."""
    healthy = [each for each in scores if each.case.expected is None]
    faulty = [each for each in scores if each.case.expected and each.case.has_signal]
    unseen = [each for each in scores if each.case.expected and not each.case.has_signal]
    warned = [sum(a.severity == "warning" for a in each.replay.alerts) for each in healthy]
    criticals = sum(a.severity == "critical" for each in healthy for a in each.replay.alerts)
    infos = sum(a.severity == "info" for each in healthy for a in each.replay.alerts)
    named = [each for each in faulty if each.named]
    delays = [each.delay for each in named if each.delay is not None]
    begun = [each for each in faulty if each.begin > 1]
    return {
        "healthy runs": str(len(healthy)),
        "false warnings per healthy run": _per(sum(warned), len(healthy)),
        "healthy runs with a warning": str(sum(bool(count) for count in warned)),
        "false criticals": str(criticals),
        "infos per healthy run": _per(infos, len(healthy)),
        "faults with a signal": str(len(faulty)),
        "faults named, rule and place": f"{len(named)} ({len(named) / max(1, len(faulty)):.0%})",
        "of these, at once or later as a warning": str(sum(each.warned for each in named)),
        "of these, cause in the words": str(sum(each.names_cause for each in named)),
        "median delay, observations": f"{statistics.median(delays):g}" if delays else "",
        "warnings before the fault, per run": _per(sum(len(e.early) for e in begun), len(begun)),
        "faults without a signal, named": f"{sum(e.named is not None for e in unseen)} of "
        f"{len(unseen)}",
        "contradictory advice": str(sum(len(each.contradictions) for each in scores)),
    }


def _per(count: int, of: int) -> str:
    return f"{count / max(1, of):.2f}"


def summary_rows(scores: Sequence[CaseScore]) -> list[list[str]]:
    """Return the figures of all sets side by side, with the goals; the titles first."""
    sides = [summary([each for each in scores if each.case.half == half]) for half in HALVES]
    rows = [[name, *(side[name] for side in sides), GOALS.get(name, "")] for name in sides[0]]
    return [["", *TITLES.values(), "goal"], *rows]


def summary_table(scores: Sequence[CaseScore]) -> Table:
    """Return the same as a table for the terminal."""
    titles, *rows = summary_rows(scores)
    table = Table(*titles, title="other kinds of training")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(scores: Sequence[CaseScore]) -> str:
    """Return the same as it is kept in docs/rules.md."""
    titles, *rows = summary_rows(scores)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def last_losses(records: Sequence[Record]) -> tuple[float, float]:
    """Return the mean loss of the first and the last record."""
    first, last = records[0].losses.values(), records[-1].losses.values()
    return statistics.fmean(first), statistics.fmean(last)
