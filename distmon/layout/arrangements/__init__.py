"""The ways to distribute a model that `distmon verify` knows, one file per family."""

from distmon.layout.arrangements.arrangement import (
    Arranged,
    Arrangement,
    CannotArrangeError,
    Limits,
)
from distmon.layout.arrangements.registry import ARRANGEMENTS, PLAIN, select
from distmon.layout.arrangements.workload import Workload

__all__ = [
    "ARRANGEMENTS",
    "PLAIN",
    "Arranged",
    "Arrangement",
    "CannotArrangeError",
    "Limits",
    "Workload",
    "select",
]
