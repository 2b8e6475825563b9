"""Summarize a run: the same tables on the console and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distmon.bench import formatting
from distmon.bench.costs import Cost, costs_of
from distmon.bench.results import NOTES, UNITS, Case, Results

SUMMARY_FILE: Final = "summary.md"


@dataclass(frozen=True)
class Section:
    """A table with a title."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def _share(interval: int) -> Callable[[Cost], str]:
    def cell(cost: Cost) -> str:
        share = cost.share(interval)
        return "" if share is None else formatting.share(share)

    return cell


def _measure(name: str) -> Callable[[Cost], str]:
    form = {"s": formatting.seconds, "bytes": formatting.size, "": "{:.0f}".format}[UNITS[name]]
    return lambda cost: form(cost.medians[name]) if name in cost.medians else ""


def _ratio(cost: Cost) -> str:
    return "" if cost.over_sampled is None else formatting.times(cost.over_sampled)


COLUMNS: Final[Mapping[str, Callable[[Cost], str]]] = {
    "p20": lambda cost: formatting.seconds(cost.observation.p20),
    "p50": lambda cost: formatting.seconds(cost.observation.p50),
    "p80": lambda cost: formatting.seconds(cost.observation.p80),
    "/ sampled": _ratio,
    "background": _measure("background"),
    "share at 1": _share(1),
    "at 100": _share(100),
    "memory": _measure("extra_memory"),
    "tags": _measure("tags"),
    "log": _measure("log_bytes"),
    "syncs": _measure("host_syncs"),
    "launches": _measure("launches"),
    "coll.": _measure("collectives"),
    "sent": _measure("sent_bytes"),
}
LEGEND: Final = (
    "p20, p50, p80: time added to one observed step, over rounds. / sampled: relative to distmon "
    "sampled. background: CPU time in threads and processes of its own. share: of the training "
    "time when one step in 1 or 100 is observed. memory: maximum beyond that of training. tags, "
    "log, host synchronizations, launches, collectives, bytes sent: per observation."
)


def cost_section(results: Results, case: Case) -> Section:
    """Return one row per contender, without the columns that were not measured."""
    costs = costs_of(results, case)
    rows = [[cost.name, *(cell(cost) for cell in COLUMNS.values())] for cost in costs]
    filled = [0, *(i for i in range(1, len(COLUMNS) + 1) if any(row[i] for row in rows))]
    headings = ["", *COLUMNS]
    step = costs[0].step
    title = f"{case.name}: {case.tensors} tensors with {formatting.count(case.elements)} elements"
    title += "" if step is None else f", bare training step {formatting.seconds(step)}"
    title += f", {max(cost.observation.rounds for cost in costs)} rounds"
    return Section(title, [headings[i] for i in filled], [[row[i] for i in filled] for row in rows])


def headline(results: Results) -> list[str]:
    """Return what a reader has to know before any number: wrong answers and a busy machine."""
    wrong = [
        f"answer wrong: {contender} on {case.name}: {what}"
        for (case, contender), what in results.wrong_answers.items()
    ]
    return [*wrong, *filter(None, [results.machine.warning])]


def remarks(results: Results) -> list[str]:
    """Return what failed or was skipped, and remarks on answers that count as right."""
    noted = {measure: results.notes(measure).items() for measure in NOTES}
    failed = [f"{who} on {case.name} failed: {why}" for (case, who), why in noted["failed"]]
    skipped = [f"{who or case.name} skipped: {why}" for (case, who), why in noted["skipped"]]
    right = [
        f"{who} on {case.name}: {note}"
        for (case, who), note in noted["answer"]
        if (case, who) not in results.wrong_answers
    ]
    return [*dict.fromkeys([*failed, *skipped, *right])]


def write_summary(
    results: Results, folder: Path, console: Console, extra: Sequence[Section] = ()
) -> None:
    """Print the summary and write it to `summary.md`."""
    sections = [*(cost_section(results, case) for case in results.cases), *extra]
    for line in headline(results):
        console.print(line, style="bold red", markup=False, highlight=False)
    for section in sections:
        console.print(_table(section))
    console.print(LEGEND, style="dim", highlight=False)
    for line in (*remarks(results), results.machine.line):
        console.print(line, markup=False, highlight=False)
    text = markdown(results, sections)
    (folder / SUMMARY_FILE).write_text(text, encoding="utf-8")


def _table(section: Section) -> Table:
    table = Table(title=Text(section.title), box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    numbers = section.headings[0] == ""
    for i, heading in enumerate(section.headings):
        table.add_column(heading, justify="right" if numbers and i else "left", no_wrap=numbers)
    for row in section.rows:
        style = "red" if any(cell.endswith(("answer wrong", "missed")) for cell in row) else None
        table.add_row(*map(Text, row), style=style)
    return table


def markdown(results: Results, sections: Sequence[Section]) -> str:
    """Return the whole summary as Markdown."""
    lines = [f"Measured by `{results.machine.command}`.", f"{results.machine.line}.", ""]
    lines += [f"**{_cell(line)}**" for line in headline(results)]
    for section in sections:
        align = "---:" if section.headings[0] == "" else "---"
        lines += ["", f"{_cell(section.title)}.", "", f"| {' | '.join(section.headings)} |"]
        lines.append(f"|---{f'|{align}' * (len(section.headings) - 1)}|")
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in section.rows]
    lines += ["", *(f"- {_cell(line)}" for line in remarks(results))]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", "\\|").replace("<", "&lt;"))
