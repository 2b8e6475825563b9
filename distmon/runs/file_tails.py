"""Read the files of a run from where the last reading ended; damage is counted, never raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distmon.errors import RunFolderError
from distmon.runs import params_file


class LineTail:
    """`records.jsonl` or `alerts.jsonl`: one entry per line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._number = 0
        """Lines before the offset."""

    def read(self, problems: list[str]) -> list[dict[str, Any]]:
        """Return the entries of the complete lines since the last call.

        A line without an end is left for the next call, and is a problem unless it is whole.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFolderError(f"cannot read {self.path}: {error.strerror or error}") from None
        entries: list[dict[str, Any]] = []
        broken: list[int] = []
        lines = content.split(b"\n")
        tail = lines.pop()
        for line in lines:
            self._number += 1
            self._offset += len(line) + 1
            if line.strip():
                entry = _parse(line)
                entries.append(entry) if entry is not None else broken.append(self._number)
        if tail.strip():
            entry = _parse(tail)
            if entry is not None:
                self._offset += len(tail)
                entries.append(entry)
            else:
                problems.append(
                    f"{self.path.name} ends in the middle of line {self._number + 1}: "
                    f"its last {len(tail)} bytes are ignored"
                )
        if broken:
            shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
            count = "1 broken line" if len(broken) == 1 else f"{len(broken)} broken lines"
            problems.append(f"{self.path.name} has {count}, skipped: line {shown}")
        return entries

    @property
    def shrunk(self) -> bool:
        """Whether the file is shorter than what was read of it: somebody replaced it."""
        try:
            return self.path.stat().st_size < self._offset
        except OSError:
            return self._offset > 0


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
        skipped = 0
        try:
            for batch in params_file.read_batches(file, position):
                if batch is None:
                    skipped += 1
                else:
                    yield batch
            dropped = params_file.bytes_after(file, position)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunFolderError(f"cannot read {file}: {error.strerror or error}") from None
        if dropped:
            problems.append(
                f"{file.name} ends in the middle of an entry: its last {dropped} bytes are ignored"
            )
        if skipped:
            problems.append(f"{file.name} has {skipped} damaged entries, skipped")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return None
    if not isinstance(entry.setdefault("attempt", 0), int):
        return None
    return entry
