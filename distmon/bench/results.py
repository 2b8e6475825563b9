"""The one file of a run, from which every table, plot and comparison is made.

`results.csv` has one row per number, each with the case, the machine, the versions and the commit.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from distmon.bench.machine import Machine
from distmon.errors import DistmonError

RESULTS_FILE: Final = "results.csv"
UNITS: Final[Mapping[str, str]] = {
    "observation": "s",
    "hooks": "s",
    "background": "s",
    "step": "s",
    "unobserved_step": "s",
    "collective": "s",
    "extra_memory": "bytes",
    "kept_memory": "bytes",
    "host_syncs": "",
    "launches": "",
    "collectives": "",
    "sent_bytes": "bytes",
    "log_bytes": "bytes",
    "tags": "",
    "answer": "",
    "failed": "",
    "skipped": "",
}
"""Measures and their units; docs/benchmarks.md says what each is.

`answer` is 1 for a right and 0 for a wrong one. It, `failed` and `skipped` have a note that says
what is wrong, failed or missing.
"""
NOTES: Final = ("answer", "failed", "skipped")


class ResultsError(DistmonError):
    """A results file that cannot be read."""


@dataclass(frozen=True)
class Case:
    """What was trained."""

    workload: str
    dtype: str
    """fp32 or bf16."""
    parallel: str
    """How ranks share the work; none on one process."""
    ranks: int
    tensors: int
    elements: int
    conditions: str = field(default="", compare=False)
    """The model, the batch and the optimizer, in words."""

    @property
    def name(self) -> str:
        """As a heading: `gpt2 fp32`, with ranks where there are several."""
        name = f"{self.workload} {self.dtype}"
        if self.parallel != "none" or self.ranks > 1:
            name += f", {self.parallel} on {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return name


@dataclass(frozen=True)
class Row:
    """One number."""

    case: Case
    contender: str
    measure: str
    round: int
    value: float
    note: str = ""


NUMBER: Final = ("contender", "measure", "unit", "round", "value", "note")
COLUMNS: Final = (*(f.name for f in fields(Case)), *NUMBER, *(f.name for f in fields(Machine)))
OPTIONAL: Final = {"conditions", "note", *(f.name for f in fields(Machine))}
"""Files of distmon 0.1.0 have these elsewhere or not at all."""


class ResultsWriter:
    """Writes row by row, so that an interrupted run keeps what it has measured."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._machine = asdict(machine)
        self._file = (folder / RESULTS_FILE).open("w", newline="", encoding="utf-8")
        self._csv = csv.DictWriter(self._file, COLUMNS)
        self._csv.writeheader()

    def add(
        self, case: Case, contender: str, measure: str, round: int, value: float, note: str = ""
    ) -> None:
        """Write one number."""
        number = (contender, measure, UNITS[measure], round, value, note)
        row = asdict(case) | dict(zip(NUMBER, number, strict=True)) | self._machine
        self._csv.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


Pairs = NDArray[np.float64]
"""[2, rounds]: the times of two contenders in the rounds that both have."""


class Results:
    """A run that was read back."""

    def __init__(self, rows: Iterable[Row], machine: Machine) -> None:
        self.rows = tuple(rows)
        self.machine = machine
        self._rounds: dict[tuple[Case, str, str], dict[int, float]] = {}
        for row in self.rows:
            key = row.case, row.contender, row.measure
            self._rounds.setdefault(key, {})[row.round] = row.value

    @cached_property
    def cases(self) -> list[Case]:
        """Cases with at least one timed contender, in the order of the run."""
        return [*dict.fromkeys(row.case for row in self.rows if row.measure == "observation")]

    @cached_property
    def contenders(self) -> list[str]:
        """All that were timed, in the order of the run."""
        return [*dict.fromkeys(row.contender for row in self.rows if row.measure == "observation")]

    def values(self, case: Case, contender: str, measure: str) -> list[float]:
        """Return one value per round; empty when it was not measured."""
        return [*self._rounds.get((case, contender, measure), {}).values()]

    def median(self, case: Case, contender: str, measure: str) -> float | None:
        """Return the median over rounds; None when it was not measured."""
        values = self.values(case, contender, measure)
        return median(values) if values else None

    def pairs(self, case: Case, over: str, under: str) -> Pairs:
        """Return the times of two contenders in the rounds that both took part in."""
        sides = [self._rounds.get((case, name, "observation"), {}) for name in (over, under)]
        both = [round for round in sides[0] if round in sides[1]]
        return np.array([[side[round] for round in both] for side in sides])

    def notes(self, measure: str) -> dict[tuple[Case, str], str]:
        """Return the notes of `answer`, `failed` or `skipped` by case and contender."""
        found = [row for row in self.rows if row.measure == measure and row.note]
        return {(row.case, row.contender): row.note for row in found}

    @cached_property
    def wrong_answers(self) -> dict[tuple[Case, str], str]:
        """What is wrong, by case and contender."""
        wrong = [row for row in self.rows if row.measure == "answer" and not row.value]
        return {(row.case, row.contender): row.note for row in wrong}


def read(path: Path) -> Results:
    """Read a results file, or that of a folder; a `ResultsError` when that is impossible."""
    path = path / RESULTS_FILE if path.is_dir() else path
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [*_checked_lines(csv.DictReader(file), path)]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ResultsError(f"cannot read {path}: {reason}") from None
    results = Results((row for row, _ in lines), lines[0][1] if lines else Machine())
    if not results.contenders:
        raise ResultsError(f"{path} holds no observation of any contender")
    return results


def _checked_lines(reader: csv.DictReader[str], path: Path) -> Iterator[tuple[Row, Machine]]:
    if missing := set(COLUMNS) - OPTIONAL - set(reader.fieldnames or ()):
        raise ResultsError(f"{path} has no column {', '.join(sorted(missing))}")
    for line in reader:
        try:
            number = float(line["value"])
            text = (line["contender"], line["measure"], int(line["round"]), number)
            row = Row(_fields(Case, line), *text, line.get("note") or "")
            machine = _fields(Machine, line)
        except (TypeError, ValueError):
            where = f"line {reader.line_num} of {path}"
            raise ResultsError(f"{where} is not a row of results") from None
        if not math.isfinite(number):
            raise ResultsError(f"line {reader.line_num} of {path} has the value {number}")
        yield row, machine


Kind = TypeVar("Kind", Case, Machine)


def _fields(kind: type[Kind], line: Mapping[str, str]) -> Kind:
    parse: dict[str, Any] = {"int": int, "float": float, "str": str}
    known = [f for f in fields(kind) if f.name in line]
    return kind(**{f.name: parse[str(f.type)](line[f.name]) for f in known})
