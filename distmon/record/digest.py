"""A hash over everything in a record, to check that all ranks derive the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np

from distmon.record.record import Record
from distmon.sampling.sample import hash48

_TEXT_OF_ONE_RANK: Final = frozenset({"mfu_source"})
"""Describes where rank 0 has its numbers from; the numbers themselves are compared."""


def record_hash(record: Record) -> int:
    """Return 48 bits; equal when the records are equal to the last bit.

    What does not count when records are compared is left out.
    """
    kept = (
        each.name for each in fields(record) if each.compare and each.name not in _TEXT_OF_ONE_RANK
    )
    return hash48(repr([(name, _plain(getattr(record, name))) for name in kept]))


def _plain(value: Any) -> Any:
    """Return a value whose `repr` shows every bit of every number."""
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return [(key, _plain(each)) for key, each in value.items()]
    if hasattr(value, "__dataclass_fields__"):
        return [(each.name, _plain(getattr(value, each.name))) for each in fields(value)]
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value
