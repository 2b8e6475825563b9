"""Reads a device one question at a time, so that one refusal costs one field and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from distmon.telemetry.hardware.reading import HardwareReading


class Refusal(Enum):
    """What an error means for the questions after it."""

    NEVER = "this device or driver does not have the field: not asked again"
    NOW = "not this time: asked again"
    LOST = "the device is gone: the rest of the reading is not asked"


@dataclass(frozen=True)
class Question:
    """One call to the driver and the fields that its answer fills, in order."""

    fields: tuple[str, ...]
    ask: Callable[[], tuple[float | int, ...]]


class FieldByField:
    """Asks all questions that have not been answered with `NEVER`. `judge` sorts the errors."""

    def __init__(
        self, questions: Sequence[Question], judge: Callable[[Exception], Refusal]
    ) -> None:
        self._questions = list(questions)
        self._judge = judge
        self.missing: dict[str, str] = {}

    def read(self) -> HardwareReading:
        """One reading. A device that is gone, or gives nothing but errors, is a `problem`."""
        values: dict[str, Any] = {}
        refused: Exception | None = None
        for question in tuple(self._questions):
            try:
                answer = dict(zip(question.fields, question.ask(), strict=True))
            except Exception as error:
                refusal = self._judge(error)
                if refusal is Refusal.LOST:
                    return HardwareReading(problem=in_words(error), samples=1)
                self._refuse(question, refusal, error)
                refused = error if refusal is Refusal.NOW else refused
                continue
            for name, value in answer.items():
                self._note(name, value)
            values |= answer
        if refused is not None and all(math.isnan(value) for value in values.values()):
            return HardwareReading(problem=in_words(refused), samples=1)
        return HardwareReading(**values, samples=1)

    def _refuse(self, question: Question, refusal: Refusal, error: Exception) -> None:
        if refusal is Refusal.NEVER:
            self._questions.remove(question)
        self.missing |= dict.fromkeys(question.fields, in_words(error))

    def _note(self, name: str, value: float) -> None:
        if math.isnan(value):
            self.missing[name] = "the driver has no value"
        else:
            self.missing.pop(name, None)


def in_words(error: Exception) -> str:
    """The error's own sentence, or its kind when it has none."""
    return str(error).strip().rstrip(".") or type(error).__name__
