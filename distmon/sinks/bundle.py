"""A debug bundle: what somebody needs who was not there when a rule fired, in one folder."""

from __future__ import annotations

import csv
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from distmon.actions import matches
from distmon.alert import Alert
from distmon.record import Column, ParamTable, Record
from distmon.redaction import Redactor
from distmon.run_folder import RunFolder, strict_json
from distmon.sinks.jsonl import record_entry
from distmon.sinks.machine import describe_machine

logger = logging.getLogger("distmon")

BUNDLES_DIR: Final = "bundles"
UNFINISHED: Final = ".unfinished"
MOST_BUNDLES: Final = 10
KEPT_RECORDS: Final = 20

README: Final = """\
Written by distmon when a rule fired. alert.json is what it said. records.jsonl holds the last \
{kept} observations before it, oldest first, one per line as in the run folder. params.csv has the \
statistics of every parameter at the newest observation, ranks.csv what each rank measured of \
itself, flow.csv the gradient norms and the gain of each block; a file is missing when nothing of \
it had been observed. environment.json is the machine: versions, devices, command line and \
environment variables, with secrets replaced by ***.
"""


class BundleSink:
    """Writes a bundle for every alert that `wanted` is about, up to 10 in a run folder."""

    def __init__(
        self,
        folder: RunFolder,
        wanted: Iterable[str],
        redactor: Redactor,
        environ: Mapping[str, str],
        argv: Sequence[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._wanted = [*wanted]
        self._redactor = redactor
        self._environ = environ
        self._argv = argv
        self._clock = clock
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._params = ParamTable.empty()
        self._told_full = False

    def record(self, record: Record) -> None:
        # The table of parameters is by far the largest part, and only the newest is written.
        self._records.append(replace(record, params=ParamTable.empty()))
        if len(record.params):
            self._params = record.params

    def alert(self, alert: Alert) -> None:
        if not matches(self._wanted, alert):
            return
        bundles = self._folder.path / BUNDLES_DIR
        bundles.mkdir(exist_ok=True)
        target = bundles / self._name(alert)
        if target.exists():
            return
        if sum(not path.name.startswith(".") for path in bundles.iterdir()) >= MOST_BUNDLES:
            if not self._told_full:
                self._told_full = True
                logger.warning(
                    "%s holds %d debug bundles; no more are written", bundles, MOST_BUNDLES
                )
            return
        staged = bundles / UNFINISHED
        shutil.rmtree(staged, ignore_errors=True)  # of a process that was killed
        try:
            staged.mkdir()
            self._write(staged, alert)
            staged.rename(target)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def close(self) -> None:
        """Nothing is held back."""

    def _name(self, alert: Alert) -> str:
        attempt = f"-attempt-{self._folder.attempt}" if self._folder.attempt else ""
        # The name of a rule of the user's own may hold anything.
        rule = re.sub(r"[^\w.-]", "_", alert.rule)[:80]
        return f"step-{alert.step:06d}-{rule}{attempt}"

    def _write(self, into: Path, alert: Alert) -> None:
        attempt = self._folder.attempt
        told = {**alert.to_dict(), "attempt": attempt, "time": self._clock()}
        _write_text(into / "alert.json", strict_json(told, indent=2) + "\n")
        lines = (strict_json(record_entry(record, attempt)) + "\n" for record in self._records)
        _write_text(into / "records.jsonl", "".join(lines))
        if len(self._params):
            columns = {**self._params.columns, **self._params.percentiles}
            _write_table(into / "params.csv", "name", self._params.names, columns)
        # A record at the end of a run, about an evaluation, has neither.
        newest = [*reversed(self._records)]
        ranked = next((record for record in newest if record.ranks), None)
        if ranked is not None:
            _write_table(into / "ranks.csv", "rank", range(ranked.world_size), ranked.ranks)
        flow = next((record.flow for record in newest if record.flow is not None), None)
        if flow is not None:
            columns = {"input_norm": flow.input_norm, "output_norm": flow.output_norm}
            _write_table(into / "flow.csv", "block", flow.blocks, {**columns, "gain": flow.gain})
        machine = describe_machine(
            self._folder.path, self._folder.versions, self._environ, self._argv, self._redactor
        )
        _write_text(into / "environment.json", strict_json(machine, indent=2) + "\n")
        _write_text(into / "README.txt", README.format(kept=KEPT_RECORDS))


def _write_table(
    path: Path, index: str, names: Sequence[Any], columns: Mapping[str, Column]
) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow([index, *columns])
        table.writerows(zip(names, *(column.tolist() for column in columns.values()), strict=True))
        _settle(file.fileno(), file.flush)


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _settle(file.fileno(), file.flush)


def _settle(descriptor: int, flush: Callable[[], None]) -> None:
    """On disk before the folder gets its name: a machine that dies leaves no empty files there."""
    flush()
    os.fsync(descriptor)
