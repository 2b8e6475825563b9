"""The two files of a benchmark run, from which every table, plot and comparison is made.

`rounds.csv` has one line per number, `context.json` says under which conditions they were measured.
Scripts import each other as `distmon_benchmarks`, the name under which `setup.py` installs this
folder.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from distmon.errors import DistmonError

ROUNDS: Final = "rounds.csv"
CONTEXT: Final = "context.json"

UNITS: Final[Mapping[str, str]] = {
    "observation": "s",
    "hooks": "s",
    "background": "s",
    "step": "s",
    "skipped_step": "s",
    "collective": "s",
    "extra_memory": "bytes",
    "kept_memory": "bytes",
    "host_syncs": "",
    "launches": "",
    "collectives": "",
    "sent_bytes": "bytes",
    "log_bytes": "bytes",
    "tags": "",
}
"""Measures and their units.

observation: extra time of the contender in one observed step, on the training thread.
hooks: the part of `observation` that is spent in forward and backward.
background: CPU time of an observation in threads and processes beside the training thread.
step: the bare training step, contender `none`.
skipped_step: extra time in a step that is not observed.
collective: an all_reduce of the bytes that the contender sends, alone, contender `all_reduce`.
extra_memory: most memory that it had beyond what training had, kept or for a moment.
kept_memory: the part of it that is kept between observations.
host_syncs, launches, collectives, sent_bytes, log_bytes, tags: per observation.
"""


class ResultsError(DistmonError):
    """A results folder that cannot be read."""


@dataclass(frozen=True)
class Case:
    """What was trained."""

    workload: str
    dtype: str
    """fp32 or bf16."""
    parallel: str
    """none, ddp or fsdp2."""
    ranks: int
    tensors: int
    elements: int


@dataclass(frozen=True)
class Row:
    """One number: a line of `rounds.csv`."""

    workload: str
    dtype: str
    parallel: str
    ranks: int
    tensors: int
    elements: int
    contender: str
    measure: str
    unit: str
    round: int
    value: float

    @property
    def case(self) -> Case:
        """What was trained when it was measured."""
        return Case(
            self.workload, self.dtype, self.parallel, self.ranks, self.tensors, self.elements
        )


COLUMNS: Final = tuple(f.name for f in fields(Row))


@dataclass
class Context:
    """Under which conditions the numbers of a run were measured."""

    command: str = ""
    date: str = ""
    """When it began, ISO 8601 with time zone."""
    device: str = ""
    """The accelerator, or the processor when there is none."""
    cpu: str = ""
    cores: int = 0
    threads: int = 0
    load_before: float = 0.0
    """Running processes, mean over the minute before."""
    load_after: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    dirty: bool = False
    """Files were changed since the commit."""
    conditions: dict[str, str] = field(default_factory=dict)
    """What else has to be known: batch, optimizer, rounds."""
    descriptions: dict[str, str] = field(default_factory=dict)
    """By contender, one line."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Contenders that did not run, and why."""
    skipped_workloads: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    """Contenders whose answer was wrong, and how; there is no speed number of them
    from there."""

    def found_wrong(self, contender: str, where: str, problem: str) -> None:
        """Note it; where it was right, its numbers stay."""
        before = self.wrong.get(contender)
        told = f"{where}: {problem}"
        self.wrong[contender] = told if before is None else f"{before}; {told}"


@dataclass(frozen=True)
class Results:
    """A run read back."""

    rows: tuple[Row, ...]
    context: Context

    def values(self, case: Case, contender: str, measure: str) -> list[float]:
        """In the order of rounds; empty when it was not measured."""
        return [
            row.value
            for row in self.rows
            if row.case == case and row.contender == contender and row.measure == measure
        ]

    def cases(self) -> list[Case]:
        """In the order in which they were measured."""
        return [*dict.fromkeys(row.case for row in self.rows)]

    def contenders(self, case: Case) -> list[str]:
        """Those with a number in this case, in the order in which they were measured."""
        return [*dict.fromkeys(row.contender for row in self.rows if row.case == case)]


class ResultsWriter:
    """Writes line by line, so that a run that is broken off keeps what it has measured."""

    def __init__(self, folder: Path, context: Context) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.context = context
        self._file = (folder / ROUNDS).open("w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._file)
        self._csv.writerow(COLUMNS)
        self.write_context()

    def add(self, case: Case, contender: str, measure: str, round: int, value: float) -> None:
        """One number that was measured."""
        row = Row(
            **asdict(case),
            contender=contender,
            measure=measure,
            unit=UNITS[measure],
            round=round,
            value=value,
        )
        self._csv.writerow([getattr(row, name) for name in COLUMNS])
        self._file.flush()

    def write_context(self) -> None:
        """Also at the beginning, for a run that is broken off."""
        text = json.dumps(asdict(self.context), indent=2, ensure_ascii=False)
        (self.folder / CONTEXT).write_text(text + "\n", encoding="utf-8")

    def close(self) -> None:
        """Write the context as it is now and close the files."""
        self.write_context()
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


def read(folder: Path) -> Results:
    """Read a run back; a `ResultsError` in one sentence when that is impossible."""
    return Results(tuple(_rows(folder / ROUNDS)), _context(folder / CONTEXT))


def _rows(path: Path) -> Iterator[Row]:
    kinds = {f.name: {"int": int, "float": float}.get(str(f.type), str) for f in fields(Row)}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if missing := set(COLUMNS) - set(reader.fieldnames or ()):
                raise ResultsError(f"{path} has no column {', '.join(sorted(missing))}")
            for line in reader:
                try:
                    yield Row(**{name: kinds[name](line[name]) for name in COLUMNS})
                except (TypeError, ValueError):
                    raise ResultsError(
                        f"line {reader.line_num} of {path} is not a whole line of results"
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ResultsError(f"cannot read {path}: {reason}") from None


def _context(path: Path) -> Context:
    known = {f.name for f in fields(Context)}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Context(**{name: value for name, value in found.items() if name in known})
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, AttributeError):
        raise ResultsError(f"{path} is not the context of a benchmark run") from None
