"""Read the files of a run from where the last reading ended; damage is counted, never raised."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from distmon.runs import params_file
from distmon.runs.arrow_stream import Damage
from distmon.untrusted.documents import parse_json
from distmon.untrusted.files import open_regular, size_text
from distmon.untrusted.values import BadValueError, Dropped

LONGEST_LINE: Final = 64 << 20
"""Bytes of an entry: one of 16 000 ranks has 10 MB."""
MOST_BYTES: Final = 1 << 30
"""Bytes of a file in one reading. Of a larger file the newest are read; the rest is named."""
_CHUNK: Final = 1 << 20

Check = Callable[[dict[str, Any], Dropped], dict[str, Any]]


class LineTail:
    """`records.jsonl` or `alerts.jsonl`: one entry per line."""

    def __init__(self, path: Path, check: Check) -> None:
        """`check` returns an entry whose values have the right types; see `runs.entries`."""
        self.path = path
        self._check = check
        self._offset = 0
        self._number = 0
        """Lines between the first one that was read and the offset."""
        self.left_out = 0
        """Bytes at the start of the file that are never read."""

    def read(self, problems: list[str]) -> list[dict[str, Any]]:
        """Return the entries of the complete lines since the last call.

        A line without an end is left for the next call, and is a problem unless it is whole.
        """
        entries: list[dict[str, Any]] = []
        broken: list[int] = []
        dropped = Dropped()
        tail = b""
        for line, ended in self._lines(problems):
            if not ended:
                tail = line
                break
            self._number += 1
            self._offset += len(line) + 1
            if line.strip():
                entry = self._parse(line, dropped)
                entries.append(entry) if entry is not None else broken.append(self._number)
        if tail.strip():
            entry = self._parse(tail, dropped)
            if entry is not None:
                self._offset += len(tail)
                entries.append(entry)
            else:
                problems.append(
                    f"{self.path.name} ends in the middle of line {self._number + 1}"
                    f"{self._counted_from()}: its last {len(tail)} bytes are ignored"
                )
        if broken:
            shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
            count = "1 broken line" if len(broken) == 1 else f"{len(broken)} broken lines"
            problems.append(
                f"{self.path.name} has {count}, skipped: line {shown}{self._counted_from()}"
            )
        problems += dropped.sentence(self.path.name)
        return entries

    @property
    def shrunk(self) -> bool:
        """Whether the file is shorter than what was read of it: it was replaced."""
        try:
            return self.path.stat().st_size < self._offset
        except OSError:
            return self._offset > 0

    def _lines(self, problems: list[str]) -> Iterator[tuple[bytes, bool]]:
        """Yield each line, and whether it has its end; of a line that is too long nothing."""
        try:
            file = open_regular(self.path, follow_links=False)
        except FileNotFoundError:
            return
        except OSError as error:
            problems.append(f"cannot read {self.path.name}: {error.strerror or error}")
            return
        with file:
            try:
                if self._offset == 0:
                    self._skip_oldest(file, problems)
                file.seek(self._offset)
            except OSError as error:
                problems.append(f"cannot read {self.path.name}: {error.strerror or error}")
                return
            start = self._offset
            while True:
                if self._offset - start >= MOST_BYTES:
                    if file.read(1):
                        problems.append(
                            f"{self.path.name} is read up to byte {self._offset}; the rest is "
                            "left to the next reading"
                        )
                    return
                try:
                    line = file.readline(LONGEST_LINE + 1)
                except OSError as error:
                    problems.append(f"cannot read {self.path.name}: {error.strerror or error}")
                    return
                if line.endswith(b"\n"):
                    yield line[:-1], True
                elif len(line) <= LONGEST_LINE:
                    if line:
                        yield line, False
                    return
                else:
                    self._number += 1
                    limit = size_text(LONGEST_LINE)
                    problems.append(
                        f"{self.path.name}: line {self._number}{self._counted_from()} is longer "
                        f"than {limit}, skipped"
                    )
                    self._offset += len(line)
                    skipped = 0
                    while not line.endswith(b"\n"):
                        line = file.readline(_CHUNK)
                        self._offset += len(line)
                        skipped += len(line)
                        if not line or skipped > LONGEST_LINE:
                            return

    def _skip_oldest(self, file: BinaryIO, problems: list[str]) -> None:
        """Start a file that is too large at the first whole line of its newest part."""
        size = os.fstat(file.fileno()).st_size
        if size <= MOST_BYTES:
            return
        file.seek(size - MOST_BYTES - 1)  # a line may start exactly at the limit
        if not file.readline(LONGEST_LINE + 1).endswith(b"\n"):
            return  # no lines there: read it from its start, as far as it has some
        self._offset = self.left_out = file.tell()
        problems.append(
            f"{self.path.name} has {size_text(size)}: its oldest {size_text(self.left_out)} are "
            "left out"
        )

    def _counted_from(self) -> str:
        return f" after the first {self.left_out} bytes" if self.left_out else ""

    def _parse(self, line: bytes, dropped: Dropped) -> dict[str, Any] | None:
        try:
            entry = parse_json(line)
            return self._check(entry, dropped) if isinstance(entry, dict) else None
        except (ValueError, BadValueError):
            return None


class ParamTail:
    """`params.arrow` and the older files that were set aside: one batch per observation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position: params_file.Position | None = None

    def batches(self, problems: list[str]) -> Iterator[Any]:
        """Yield the complete batches since the last call, one in memory at a time."""
        if self._position is None:
            for file in params_file.set_aside_files(self.path):
                yield from self._batches(file, params_file.Position(), problems)
        # A file without its schema yet is read from the start the next time.
        position = self._position or params_file.Position()
        yield from self._batches(self.path, position, problems)
        self._position = position

    def _batches(
        self, file: Path, position: params_file.Position, problems: list[str]
    ) -> Iterator[Any]:
        damage = Damage()
        try:
            yield from params_file.read_batches(file, position, damage)
        except FileNotFoundError:
            return
        except OSError as error:
            problems.append(f"cannot read {file.name}: {error.strerror or error}")
            return
        if damage.tail:
            problems.append(
                f"{file.name} ends in the middle of an entry: its last {damage.tail} bytes are "
                "ignored"
            )
        if damage.entries:
            problems.append(f"{file.name} has {damage.entries} damaged entries, skipped")
