"""The tables of a run: on the console, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table

from .goals import verdicts
from .step_truth import QUANTITIES
from .summary import ParameterErrors, Summary


@dataclass(frozen=True)
class TextTable:
    """A table of plain texts."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]

    def for_console(self) -> Table:
        """Return the table as rich prints it."""
        table = Table(title=escape(self.title), title_justify="left", box=box.SIMPLE)
        for column in self.columns:
            table.add_column(escape(column))
        for line in self.lines:
            table.add_row(*map(escape, line))
        return table

    def for_markdown(self) -> str:
        """Return the table under its title as a heading."""
        lines = [self.columns, ["---"] * len(self.columns), *self.lines]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n"


def all_tables(summary: Summary) -> Iterator[TextTable]:
    """Yield every table; the goals come last, where a console reader looks first."""
    yield total_table(summary)
    yield family_table(summary)
    yield parameter_table(summary)
    yield coverage_table(summary)
    yield goal_table(summary)


def markdown(summary: Summary, conditions: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the whole page."""
    under = ", ".join(f"{name} {value}" for name, value in conditions.items())
    head = ["# Accuracy against float64 truth", f"Conditions: {under}.", *notes]
    tables = [table.for_markdown() for table in all_tables(summary)]
    return "\n\n".join(head) + "\n\n" + "\n".join(tables)


def total_table(summary: Summary) -> TextTable:
    """Return the error of the total gradient norm by family, dtype, stage, mode and batch."""
    errors = summary.total_errors("family", "dtype", "stage", "mode", "batch")
    cells = [(mode, batch) for mode in summary.modes for batch in summary.batches]
    rows = dict.fromkeys(key[:3] for key in errors)
    lines = []
    for row in rows:
        found = [errors.get((*row, *cell)) for cell in cells]
        texts = ["" if e is None else f"{share(e.rms)} / {share(e.worst)}" for e in found]
        lines.append([*row, *texts])
    columns = ["family", "dtype", "stage", *(f"{mode}, {batch}" for mode, batch in cells)]
    title = "Error of the total gradient norm: rms / max, by mode and tokens in the batch"
    return TextTable(title, columns, lines)


def family_table(summary: Summary) -> TextTable:
    """Return all errors of gradients by mode and family, over dtypes, stages and batches."""
    totals = summary.total_errors("mode", "family")
    errors = summary.parameter_errors("mode", "family", "quantity")
    lines = [
        [mode, family, share(totals[mode, family].rms), *_percentiles(found)]
        for (mode, family, quantity), found in errors.items()
        if quantity == "grad_norm"
    ]
    columns = ["mode", "family", "total rms", "p50", "p90", "p99", "max"]
    return TextTable("Gradients by family: total norm, and norms by parameter", columns, lines)


def parameter_table(summary: Summary) -> TextTable:
    """Return the errors by parameter over all families."""
    errors = summary.parameter_errors("mode", "quantity", "dtype")
    lines = [
        [*key, str(e.count), *_percentiles(e), str(e.unknown), str(e.zero_claims)]
        for key, e in errors.items()
    ]
    columns = ["mode", "quantity", "dtype", "numbers", "p50", "p90", "p99", "max"]
    title = "Errors by parameter, over all families, stages and batches"
    return TextTable(title, [*columns, "unknown", "0 +- 0"], lines)


def coverage_table(summary: Summary) -> TextTable:
    """Return the share of truths within 2 standard errors by kind of tensor."""
    errors = summary.parameter_errors("mode", "kind", "quantity")
    rows = dict.fromkeys((mode, kind) for mode, kind, _ in errors)
    lines = []
    for row in rows:
        found = [errors[*row, quantity] for quantity in QUANTITIES]
        texts = [f"{share(e.coverage)} of {e.bars}" if e.bars else "-" for e in found]
        zeros, unknown = (sum(getattr(e, n) for e in found) for n in ("zero_claims", "unknown"))
        lines.append([*row, str(found[0].count), *texts, str(unknown), str(zeros)])
    columns = ["mode", "kind", "numbers each", *QUANTITIES, "unknown", "0 +- 0"]
    title = "Truths within 2 standard errors, by kind of tensor, of those not read in full"
    return TextTable(title, columns, lines)


def goal_table(summary: Summary) -> TextTable:
    """Return the verdicts."""
    lines = [
        [v.mode, v.goal, v.measured, "reached" if v.reached else "MISSED"]
        for v in verdicts(summary)
    ]
    return TextTable("Goals", ["mode", "goal", "measured (worst)", "verdict"], lines)


def share(value: float) -> str:
    """Return a share in percent, with as many digits as say something."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:.2%}" if abs(value) < 0.1 else f"{value:.1%}"


def _percentiles(errors: ParameterErrors) -> list[str]:
    return [share(e) for e in (errors.p50, errors.p90, errors.p99, errors.worst)]
