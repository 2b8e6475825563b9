"""Convert parsed values to the types that a reader expects; `BadValueError` for everything else.

A converter takes any value and returns one of its type. `fields` and `each` keep what can be
converted, and note the rest by its path, so that a reader can say what it left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

Convert = Callable[[Any], Any]
LARGEST_INT: Final = 2**62
"""Fits into 64 bits with room for a sum."""


class BadValueError(ValueError):
    """A value has another type than expected."""


class Dropped:
    """The paths of values that were left out, for one sentence."""

    def __init__(self) -> None:
        self.count = 0
        self.examples: list[str] = []

    def add(self, path: str) -> None:
        """Note one value."""
        self.count += 1
        if len(self.examples) < 3 and path not in self.examples:
            self.examples.append(path)

    def sentence(self, file: str) -> list[str]:
        """Return one sentence, or none when nothing was left out."""
        if not self.count:
            return []
        shown = ", ".join(self.examples)
        what = "1 value" if self.count == 1 else f"{self.count} values"
        return [f"{file} has {what} of an unexpected type, ignored: {shown}"]


def number(value: Any) -> float:
    """Return a float; null is NaN, because JSON has no NaN."""
    if value is None:
        return math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass  # an integer beyond the range of a float is refused below
    raise BadValueError


def integer(value: Any) -> int:
    """Return an integer of at most 62 bits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_INT:
        return value
    raise BadValueError


def count(value: Any) -> int:
    """Return an integer from 0 to 2**31 - 1, such as a number of ranks or an attempt."""
    if 0 <= integer(value) < 2**31:
        return int(value)
    raise BadValueError


def boolean(value: Any) -> bool:
    """Return a bool."""
    if isinstance(value, bool):
        return value
    raise BadValueError


def text(value: Any) -> str:
    """Return a string that every encoding accepts: a lone surrogate becomes its escape."""
    if isinstance(value, str):
        return encodable(value)
    raise BadValueError


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping with string keys."""
    if isinstance(value, dict):
        return {encodable(str(key)): inner for key, inner in value.items()}
    raise BadValueError


def optional(convert: Convert) -> Convert:
    """Accept None as it is."""
    return lambda value: None if value is None else convert(value)


def one_of(*choices: str) -> Convert:
    """Accept one of these strings."""

    def convert(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise BadValueError

    return convert


def sequence(convert: Convert) -> Convert:
    """Return a list; one bad item spoils it, because lists are columns of equal length."""

    def convert_all(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise BadValueError
        return [convert(item) for item in value]

    return convert_all


def structure(
    required: Mapping[str, Convert], others: Mapping[str, tuple[Convert, Any]] | None = None
) -> Convert:
    """Return a dict with exactly these keys; of `others` a missing one gets its default."""

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise BadValueError
        found = {}
        for key, convert_one in required.items():
            if key not in value:
                raise BadValueError
            found[key] = convert_one(value[key])
        for key, (convert_one, default) in (others or {}).items():
            found[key] = convert_one(value[key]) if key in value else default
        return found

    return convert


def each_value(value: Any, convert: Convert, path: str, dropped: Dropped) -> dict[str, Any]:
    """Return the entries of a mapping that can be converted; the others are noted."""
    if not isinstance(value, dict):
        dropped.add(path)
        return {}
    found = {}
    for key, inner in value.items():
        try:
            found[encodable(str(key))] = convert(inner)
        except BadValueError:
            dropped.add(f"{path}.{key}")
    return found


def each_item(value: Any, convert: Convert, path: str, dropped: Dropped) -> list[Any]:
    """Return the items of a list that can be converted; the others are noted."""
    if not isinstance(value, list):
        dropped.add(path)
        return []
    found = []
    for item in value:
        try:
            found.append(convert(item))
        except BadValueError:
            dropped.add(path)
    return found


def encodable(value: str) -> str:
    """Return the string with lone surrogates written as `\\udc80`; UTF-8 has none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "backslashreplace").decode()
    return value
