"""A debug bundle: a folder with what is needed to understand an alert afterwards."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

from distmon.record.record import Column, ParamTable, Record
from distmon.redaction import Redactor
from distmon.rules.alert import Alert
from distmon.rules.alert_patterns import matches
from distmon.runs.run_folder import RunFolder
from distmon.runs.run_json import strict_json
from distmon.sinks.environment import TrainingProcess, describe_environment
from distmon.sinks.jsonl import record_entry
from distmon.untrusted.files import PRIVATE, create_exclusively, real_folder

logger = logging.getLogger("distmon")

BUNDLES_DIR: Final = "bundles"
UNFINISHED: Final = ".unfinished"
MOST_BUNDLES: Final = 10
KEPT_RECORDS: Final = 20

README: Final = """\
Written by distmon when a rule fired. alert.json is the alert. records.jsonl holds the last \
{kept} observations before it, oldest first, one per line as in the run folder. params.csv has the \
statistics of every parameter at the newest observation, ranks.csv the telemetry of each rank, \
flow.csv the gradient norms and the gradient gain of each block; a file is missing when nothing of \
it had been observed. environment.json describes the machine: versions, devices, command line and \
environment variables, with secrets replaced by ***.
"""


class BundleSink:
    """Writes a bundle for every alert that matches `wanted`, at most 10 per run folder."""

    def __init__(
        self,
        folder: RunFolder,
        wanted: Iterable[str],
        redactor: Redactor,
        environ: Mapping[str, str],
        training: TrainingProcess,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._wanted = [*wanted]
        self._redactor = redactor
        self._environ = environ
        self._training = training
        self._clock = clock
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._params = ParamTable.empty()
        self._warned_full = False

    def record(self, record: Record) -> None:
        # The parameter table is by far the largest part, and only the newest one is written.
        self._records.append(replace(record, params=ParamTable.empty()))
        if len(record.params):
            self._params = record.params

    def alert(self, alert: Alert) -> None:
        if not matches(self._wanted, alert):
            return
        bundles = real_folder(self._folder.path / BUNDLES_DIR)
        target = bundles / self._name(alert)
        if target.exists():
            return
        if sum(not path.name.startswith(".") for path in bundles.iterdir()) >= MOST_BUNDLES:
            if not self._warned_full:
                self._warned_full = True
                logger.warning(
                    "distmon: %s holds %d debug bundles; no more are written",
                    bundles,
                    MOST_BUNDLES,
                )
            return
        staged = bundles / UNFINISHED
        shutil.rmtree(staged, ignore_errors=True)  # left by a killed process
        try:
            staged.mkdir(mode=0o700)
            self._write(staged, alert)
            staged.rename(target)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def close(self) -> None:
        """Do nothing: every bundle is complete when it is written."""

    def _name(self, alert: Alert) -> str:
        attempt = f"-attempt-{self._folder.attempt}" if self._folder.attempt else ""
        # The name of a user-defined rule may contain any character.
        rule = re.sub(r"[^\w.-]", "_", alert.rule)[:80]
        return f"step-{alert.step:06d}-{rule}{attempt}"

    def _write(self, into: Path, alert: Alert) -> None:
        attempt = self._folder.attempt
        entry = {**alert.to_dict(), "attempt": attempt, "time": self._clock()}
        _write_text(into / "alert.json", strict_json(entry, indent=2) + "\n")
        lines = (strict_json(record_entry(record, attempt)) + "\n" for record in self._records)
        _write_text(into / "records.jsonl", "".join(lines))
        if len(self._params):
            columns = {**self._params.columns, **self._params.percentiles}
            _write_table(into / "params.csv", "name", self._params.names, columns)
        # A partial record at the end of a run has neither rank telemetry nor gradient gain.
        newest = [*reversed(self._records)]
        ranked = next((record for record in newest if record.ranks), None)
        if ranked is not None:
            _write_table(into / "ranks.csv", "rank", range(ranked.world_size), ranked.ranks)
        gains = (record.gradient_gain for record in newest)
        gain = next((each for each in gains if each is not None), None)
        if gain is not None:
            columns = {"input_norm": gain.input_norm, "output_norm": gain.output_norm}
            _write_table(into / "flow.csv", "block", gain.blocks, {**columns, "gain": gain.gain})
        environment = describe_environment(
            self._folder.path, self._folder.versions, self._environ, self._training, self._redactor
        )
        _write_text(into / "environment.json", strict_json(environment, indent=2) + "\n")
        _write_text(into / "README.txt", README.format(kept=KEPT_RECORDS))


def _write_table(
    path: Path, index: str, names: Sequence[Any], columns: Mapping[str, Column]
) -> None:
    with _create(path) as file:
        table = csv.writer(file)
        table.writerow([index, *columns])
        table.writerows(zip(names, *(column.tolist() for column in columns.values()), strict=True))
        _sync(file.fileno(), file.flush)


def _write_text(path: Path, text: str) -> None:
    with _create(path) as file:
        file.write(text)
        _sync(file.fileno(), file.flush)


def _create(path: Path) -> TextIO:
    """Open a new file that only this user can read: messages and settings may hold anything."""
    return io.TextIOWrapper(create_exclusively(path, PRIVATE), encoding="utf-8", newline="")


def _sync(descriptor: int, flush: Callable[[], None]) -> None:
    """Write to disk before the folder is renamed, so that a crash leaves no empty files in it."""
    flush()
    os.fsync(descriptor)
