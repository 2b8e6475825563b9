"""The parallelisms that `distmon verify` trains, one file per family."""

from distmon.verify.parallelisms.parallelism import (
    DistributedModel,
    Limits,
    Parallelism,
    UnsupportedModelError,
)
from distmon.verify.parallelisms.registry import PARALLELISMS, select
from distmon.verify.parallelisms.replicated import PLAIN
from distmon.verify.parallelisms.workload import Workload

__all__ = [
    "PARALLELISMS",
    "PLAIN",
    "DistributedModel",
    "Limits",
    "Parallelism",
    "UnsupportedModelError",
    "Workload",
    "select",
]
