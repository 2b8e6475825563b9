"""Read a device with one query per field, so that a failed query loses only its own fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from distmon.collect.telemetry.hardware.reading import HardwareReading


class QueryFailure(Enum):
    """What an error means for later queries."""

    NEVER = "this device or driver does not have the field: not queried again"
    NOW = "a temporary failure: queried again at the next reading"
    LOST = "the device is lost: the rest of the reading is skipped"


@dataclass(frozen=True)
class Query:
    """One call to the driver and the fields that it fills, in order."""

    fields: tuple[str, ...]
    ask: Callable[[], tuple[float | int, ...]]


class DeviceQueries:
    """Runs all queries that have not failed with `NEVER`; `classify_error` classifies errors."""

    def __init__(
        self,
        queries: Sequence[Query],
        classify_error: Callable[[Exception], QueryFailure],
        fields: Collection[str] | None = None,
    ) -> None:
        """`fields`: those that are needed; nothing else is asked. None: all."""
        self._queries = [
            query
            for query in queries
            if fields is None or any(field in fields for field in query.fields)
        ]
        self._classify_error = classify_error
        self.missing: dict[str, str] = {}

    def read(self) -> HardwareReading:
        """Return one reading, with a `problem` if the device is lost or all queries fail."""
        values: dict[str, Any] = {}
        last_error: Exception | None = None
        for query in tuple(self._queries):
            try:
                answer = dict(zip(query.fields, query.ask(), strict=True))
            except Exception as error:
                failure = self._classify_error(error)
                if failure is QueryFailure.LOST:
                    return HardwareReading(problem=error_text(error), samples=1)
                self._fail(query, failure, error)
                last_error = error if failure is QueryFailure.NOW else last_error
                continue
            for name, value in answer.items():
                self._note(name, value)
            values |= answer
        if last_error is not None and all(math.isnan(value) for value in values.values()):
            return HardwareReading(problem=error_text(last_error), samples=1)
        return HardwareReading(**values, samples=1)

    def _fail(self, query: Query, failure: QueryFailure, error: Exception) -> None:
        if failure is QueryFailure.NEVER:
            self._queries.remove(query)
        self.missing |= dict.fromkeys(query.fields, error_text(error))

    def _note(self, name: str, value: float) -> None:
        if math.isnan(value):
            self.missing[name] = "the driver has no value"
        else:
            self.missing.pop(name, None)


class DeviceReader:
    """Reads one device; opened by the module of its vendor, which also closes it."""

    def __init__(self, device: str, queries: DeviceQueries) -> None:
        self.device = device
        self._queries = queries

    @property
    def missing(self) -> dict[str, str]:
        """Why a field is NaN, by field."""
        return self._queries.missing

    def read(self) -> HardwareReading:
        """Read the device once."""
        return self._queries.read()


def error_text(error: Exception) -> str:
    """Return the error's message, or its type when it has none."""
    return str(error).strip().rstrip(".") or type(error).__name__
